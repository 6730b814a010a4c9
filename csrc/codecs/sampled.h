// The kind that sends one element of each stretch of N, at positions that follow from a hash: random.
// shoal/collectives/codecs/with_torch.py describes it.
#pragma once

#include "codecs/kept.h"
#include "codecs/random_bits.h"

namespace shoal {
namespace {

// The stretches of a vector, and the positions of the elements that are sent.
class Sampled {
 public:
  Sampled(const Codec& codec, size_t count) : keys_(keys_of(codec.seed)), number_(codec.number), count_(count) {}

  size_t stretches() const { return (count_ + number_ - 1) / number_; }
  size_t begin(size_t stretch) const { return stretch * number_; }
  size_t length(size_t stretch) const { return lesser(number_, count_ - begin(stretch)); }

  // Stretches that are done in one go; they have a chunk's elements at most.
  size_t together() const { return codec_chunk / number_; }

  // Lists the positions of so many stretches, counted from the first one's begin; returns the elements of all.
  size_t list(size_t first, Positions& kept) const {
    kept.count = lesser(together(), stretches() - first);
    for (size_t index = 0; index < kept.count; ++index) {
      const uint64_t bits = random_bits(keys_, first + index);
      kept.at[index] = static_cast<uint16_t>(index * number_ + (bits * length(first + index) >> 32));
    }
    return lesser(kept.count * number_, count_ - begin(first));
  }

 private:
  const RandomKeys keys_;
  const size_t number_, count_;
};

template <class U>
bool is_finite(const float* values, size_t count) {
  typename U::Int largest[4] = {};
  size_t at = 0;
  for (; at + 4 * U::lanes <= count; at += 4 * U::lanes) {
#pragma GCC unroll 4
    for (size_t p = 0; p < 4; ++p) {
      if ((at + p * U::lanes) % line_elements == 0) fetch(values + at + p * U::lanes + block_ahead);
      largest[p] = U::larger(largest[p], U::magnitudes(U::read(values + at + p * U::lanes)));
    }
  }
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
  Positions kept;
  float sent[codec_chunk];
  for (size_t first = 0; first < sampled.stretches(); first += sampled.together()) {
    const float* const chunk = values + sampled.begin(first);
    const size_t length = sampled.list(first, kept);
    const bool all_finite = is_finite<U>(chunk, length);
    for (size_t index = 0; index < kept.count; ++index) {
      const size_t stretch = first + index;
      const bool is_sent =
          all_finite || is_finite<U>(values + sampled.begin(stretch), sampled.length(stretch));
      sent[index] = is_sent ? chunk[kept.at[index]] : float_of(nan_bits);
    }
    std::memcpy(payload + first * sizeof(float), sent, kept.count * sizeof(float));
    if (residual != nullptr) write_rest(chunk, length, kept, sent, residual + sampled.begin(first));
  }
  return sampled.stretches() * sizeof(float);
}

template <class Into>
bool decode_sampled(const Codec& codec, const std::byte* payload, float* out, size_t count, Into& into) {
  const Sampled sampled(codec, count);
  Positions kept;
  float sent[codec_chunk];
  for (size_t first = 0; first < sampled.stretches(); first += sampled.together()) {
    const size_t length = sampled.list(first, kept);
    std::memcpy(sent, payload + first * sizeof(float), kept.count * sizeof(float));
    into(out + sampled.begin(first), length, kept, sent);
  }
  into.finish();
  return true;
}

}  // namespace
}  // namespace shoal
