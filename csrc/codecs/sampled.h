// The kind that sends one element of each stretch of N, at positions that follow from a hash: random.
// shoal/collectives/codecs/sampled.py describes it.
#pragma once

#include "codecs/random_bits.h"

namespace shoal {
namespace {

// The positions of the elements that are sent, one after the other.
class Sampled {
 public:
  Sampled(const Codec& codec, size_t count) : keys_(keys_of(codec.seed)), number_(codec.number), count_(count) {}

  size_t stretches() const { return (count_ + number_ - 1) / number_; }
  size_t begin(size_t stretch) const { return stretch * number_; }
  size_t length(size_t stretch) const { return lesser(number_, count_ - begin(stretch)); }
  size_t position(size_t stretch) const {
    return begin(stretch) + (uint64_t{random_bits(keys_, stretch)} * length(stretch) >> 32);
  }

 private:
  const RandomKeys keys_;
  const size_t number_, count_;
};

template <class U>
bool is_finite(const float* values, size_t count) {
  typename U::Int largest[4] = {};
  size_t at = 0;
  for (; at + 4 * U::lanes <= count; at += 4 * U::lanes)
#pragma GCC unroll 4
    for (size_t p = 0; p < 4; ++p)
      largest[p] = U::larger(largest[p], U::magnitudes(U::read(values + at + p * U::lanes)));
  for (; at < count; ++at)
    if (magnitude_of(values[at]) >= infinity_bits) return false;
  return largest_lane<U>(U::larger(U::larger(largest[0], largest[1]), U::larger(largest[2], largest[3]))) <
         infinity_bits;
}

// Many stretches at a time are searched for what is not finite, and only where there is some, each of them.
template <class U>
size_t encode_sampled(const Codec& codec, const float* values, size_t count, std::byte* payload,
                      float* residual) {
  const Sampled sampled(codec, count);
  const bool streamed = residual != nullptr && residual != values && is_streamed(residual, count);
  const size_t together = (codec_chunk + codec.number - 1) / codec.number;
  for (size_t first = 0; first < sampled.stretches(); first += together) {
    const size_t last = lesser(first + together, sampled.stretches());
    const size_t begin = sampled.begin(first), end = lesser(sampled.begin(last), count);
    const bool all_finite = is_finite<U>(values + begin, end - begin);
    float rest[2 * codec_chunk];
    float* const to = streamed ? rest : residual == nullptr ? nullptr : residual + begin;
    if (to != nullptr && to != values + begin) std::memcpy(to, values + begin, (end - begin) * sizeof(float));
    for (size_t stretch = first; stretch < last; ++stretch) {
      const size_t position = sampled.position(stretch);
      const float value = streamed ? rest[position - begin] : values[position];
      const bool is_sent = all_finite || is_finite<U>(values + sampled.begin(stretch), sampled.length(stretch));
      const float sent = is_sent ? value : float_of(nan_bits);
      std::memcpy(payload + stretch * sizeof(float), &sent, sizeof(float));
      if (to != nullptr) to[position - begin] = value - sent;
    }
    if (streamed) stream_all<U>(residual + begin, rest, end - begin);
  }
  if (streamed) U::fence();
  return sampled.stretches() * sizeof(float);
}

template <class Into>
bool decode_sampled(const Codec& codec, const std::byte* payload, float* out, size_t count, Into into) {
  const Sampled sampled(codec, count);
  for (size_t stretch = 0; stretch < sampled.stretches(); ++stretch, payload += sizeof(float)) {
    float sent;
    std::memcpy(&sent, payload, sizeof(float));
    into(out + sampled.begin(stretch), sampled.length(stretch), sampled.position(stretch) - sampled.begin(stretch), sent);
  }
  return true;
}

struct ReplaceSampled {
  void operator()(float* stretch, size_t length, size_t position, float sent) const {
    std::memset(stretch, 0, length * sizeof(float));
    stretch[position] = sent;
  }
};

struct AddSampled {
  float factor;
  void operator()(float* stretch, size_t, size_t position, float sent) const { stretch[position] += sent * factor; }
};

}  // namespace
}  // namespace shoal
