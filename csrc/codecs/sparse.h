// Kinds that send the elements of each chunk that are largest: topk and threshold.
// shoal/collectives/codecs/sparse.py describes payloads.
//
// Magnitudes are compared as integers: the bits of a float32 without its sign are in the order of its magnitude, with
// infinity and NaN above all numbers. The kept elements of a chunk are those of at least some magnitude, which one
// pass marks in a bitmap. The chunk is read from memory once, and from the cache after that.
//
// topk finds that magnitude in linear time. If the chunk is cut into 256 groups, the k-th largest of the groups' maxima
// is at most the k-th largest magnitude, and for small k little less: few more than k elements are at least as large.
// Of those the exact one is found by bisection of the bits, counting at each step.
#pragma once

#include "codecs/lanes.h"
#include "codecs/quantised.h"
#include "codecs/sums.h"

namespace shoal {
namespace {

constexpr size_t group_count = 256;
constexpr size_t word_bits = 64;

// Positions of elements, ascending; a list has room for what is written past its end.
struct Positions {
  static constexpr size_t at_once = 4;
  uint16_t at[codec_chunk + at_once];
  size_t count = 0;
};

template <class U>
size_t count_at_least(const int32_t* magnitudes, size_t count, int32_t least) {
  size_t found = 0;
  for (size_t at = 0; at < count; at += U::lanes)
    found += static_cast<size_t>(__builtin_popcount(U::at_least(
        load<typename U::Int>(reinterpret_cast<const std::byte*>(magnitudes + at)), least)));
  return found;
}

// A magnitude that at least k, and at most `most` elements reach; where no such magnitude exists because of ties, the
// k-th largest. `least` is reached by at least k. The count is of whole vectors.
template <class U>
int32_t bisect(const int32_t* magnitudes, size_t count, size_t k, size_t most, int32_t least) {
  typename U::Int largest{};
  for (size_t at = 0; at < count; at += U::lanes)
    largest = U::larger(largest, load<typename U::Int>(reinterpret_cast<const std::byte*>(magnitudes + at)));
  uint32_t low = static_cast<uint32_t>(least), high = static_cast<uint32_t>(largest_lane<U>(largest)) + 1;
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    const size_t found = count_at_least<U>(magnitudes, count, static_cast<int32_t>(middle));
    if (found < k) {
      high = middle;
    } else {
      low = middle;
      if (found <= most) break;
    }
  }
  return static_cast<int32_t>(low);
}

// A magnitude that at least k elements of a chunk reach, and few more.
template <class U>
int32_t lower_bound(const float* chunk, size_t k) {
  if (k <= group_count / 2) {
    int32_t maxima[group_count];
    for (size_t group = 0; group < group_count; group += U::lanes) {
      typename U::Int largest{};
#pragma GCC unroll 4
      for (size_t at = group; at < codec_chunk; at += group_count)
        largest = U::larger(largest, U::magnitudes(U::read(chunk + at)));
      store(reinterpret_cast<std::byte*>(maxima + group), largest);
    }
    return bisect<U>(maxima, group_count, k, k + k / 8, 0);
  }
  int32_t magnitudes[codec_chunk];
  for (size_t at = 0; at < codec_chunk; at += U::lanes)
    store(reinterpret_cast<std::byte*>(magnitudes + at), U::magnitudes(U::read(chunk + at)));
  return bisect<U>(magnitudes, codec_chunk, k, k, 0);
}

// Lists the elements of at least a magnitude. The next chunk is fetched from memory meanwhile.
template <class U>
void list_at_least(const float* chunk, int32_t least, Positions& found) {
  size_t count = 0;
  for (size_t begin = 0; begin < codec_chunk; begin += word_bits) {
    uint64_t word = 0;
#pragma GCC unroll 16
    for (size_t at = 0; at < word_bits; at += U::lanes) {
      if (at % 16 == 0) __builtin_prefetch(chunk + codec_chunk + begin + at);
      word |= static_cast<uint64_t>(U::at_least(U::magnitudes(U::read(chunk + begin + at)), least)) << at;
    }
    const size_t more = static_cast<size_t>(__builtin_popcountll(word));
    uint16_t* to = found.at + count;
    // Mostly few: a fixed number is written without a branch for each, and overwritten where it is too many.
    for (size_t index = 0; index < Positions::at_once || index < more; ++index, word &= word - 1)
      to[index] = static_cast<uint16_t>(begin + static_cast<size_t>(__builtin_ctzll(word | (1ull << 63))));
    count += more;
  }
  found.count = count;
}

// Keeps the k largest; of equal magnitudes those of the lowest positions.
template <class U>
void keep_largest(const float* chunk, size_t k, int32_t least, Positions& found) {
  int32_t magnitudes[codec_chunk];
  const size_t padded = (found.count + U::lanes - 1) / U::lanes * U::lanes;
  for (size_t index = 0; index < found.count; ++index) magnitudes[index] = magnitude_of(chunk[found.at[index]]);
  for (size_t index = found.count; index < padded; ++index) magnitudes[index] = -1;
  const int32_t smallest = bisect<U>(magnitudes, padded, k, k, least);
  size_t larger = 0;
  for (size_t index = 0; index < found.count; ++index) larger += magnitudes[index] > smallest;
  size_t equal = k - larger, kept = 0;
  for (size_t index = 0; index < found.count; ++index) {
    const bool is_equal = magnitudes[index] == smallest && equal > 0;
    equal -= is_equal;
    found.at[kept] = found.at[index];
    kept += is_equal || magnitudes[index] > smallest;
  }
  found.count = kept;
}

template <class U>
void list_largest(const float* chunk, size_t k, Positions& found) {
  const int32_t least = lower_bound<U>(chunk, k);
  list_at_least<U>(chunk, least, found);
  if (found.count > k) keep_largest<U>(chunk, k, least, found);
}

// ---- Payloads

inline size_t bytes_of_positions(size_t count) { return (count * 12 + 7) / 8; }

// Two positions in three bytes. Writes up to a byte past the end, where the values follow.
inline std::byte* write_positions(std::byte* to, const Positions& kept) {
  for (size_t index = 0; index < kept.count; index += 2, to += 3) {
    const uint32_t second = index + 1 < kept.count ? kept.at[index + 1] : 0u;
    const uint32_t pair = kept.at[index] | (second << 12);
    std::memcpy(to, &pair, sizeof(pair));
  }
  return to - kept.count % 2;
}

// False: a position is not within the chunk.
inline bool read_positions(const std::byte* from, size_t count, size_t length, Positions& kept) {
  uint16_t highest = 0;
  for (size_t index = 0; index < count; ++index) {
    uint16_t two_bytes;
    std::memcpy(&two_bytes, from + index * 12 / 8, sizeof(two_bytes));
    kept.at[index] = index % 2 == 0 ? two_bytes & 0xfff : static_cast<uint16_t>(two_bytes >> 4);
    highest = kept.at[index] > highest ? kept.at[index] : highest;
  }
  kept.count = count;
  return count == 0 || highest < length;
}

// Elements as they are; NaN for those that are not finite.
inline std::byte* write_values(std::byte* to, const float* chunk, const Positions& kept, float* sent) {
  for (size_t index = 0; index < kept.count; ++index) {
    const float value = chunk[kept.at[index]];
    sent[index] = magnitude_of(value) >= infinity_bits ? float_of(nan_bits) : value;
  }
  std::memcpy(to, sent, kept.count * sizeof(float));
  return to + kept.count * sizeof(float);
}

inline float two_bit_value(uint32_t code, const float* magnitudes) {
  const float magnitude = magnitudes[code >> 1 & 1];
  return (code & 1) != 0 ? -magnitude : magnitude;
}

inline uint16_t bfloat16_of(double mean) {
  const uint32_t bits = bits_of(static_cast<float>(mean));
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Two bits of each element, and two magnitudes.
template <class U>
std::byte* write_two_bits(std::byte* to, const float* chunk, const Positions& kept, float* sent) {
  float parts[2][codec_chunk / 2];  // magnitudes: all, later the smaller ones, and the larger ones
  bool is_finite = true;
  for (size_t index = 0; index < kept.count; ++index) {
    const int32_t magnitude = magnitude_of(chunk[kept.at[index]]);
    is_finite &= magnitude < infinity_bits;
    sent[index] = parts[0][index] = float_of(static_cast<uint32_t>(magnitude));
  }
  const double mean = ordered_sum<U, Magnitude>(sent, kept.count) / static_cast<double>(kept.count);
  std::memset(to, 0, (kept.count + 3) / 4);
  size_t counts[2] = {};
  for (size_t index = 0; index < kept.count; ++index) {
    const bool is_larger = static_cast<double>(sent[index]) > mean;
    const uint32_t code = (chunk[kept.at[index]] < 0.0f ? 1u : 0u) | (is_larger ? 2u : 0u);
    parts[0][index] = is_larger ? 0.0f : sent[index];
    parts[1][index] = is_larger ? sent[index] : 0.0f;
    counts[is_larger] += 1;
    to[index / 4] |= static_cast<std::byte>(code << (index % 4 * 2));
  }
  uint16_t narrow[2] = {nan_bits >> 16, nan_bits >> 16};
  float wide[2];
  for (size_t which = 0; which < 2; ++which) {
    const size_t divisor = counts[which] > 0 ? counts[which] : 1;
    const double sum = ordered_sum<U, Magnitude>(parts[which], kept.count);
    if (is_finite) narrow[which] = bfloat16_of(sum / static_cast<double>(divisor));
    wide[which] = float_of(static_cast<uint32_t>(narrow[which]) << 16);
  }
  for (size_t index = 0; index < kept.count; ++index)
    sent[index] = two_bit_value(static_cast<uint32_t>(to[index / 4]) >> (index % 4 * 2), wide);
  to += (kept.count + 3) / 4;
  std::memcpy(to, narrow, sizeof(narrow));
  return to + sizeof(narrow);
}

inline const std::byte* read_two_bits(const std::byte* from, size_t count, float* values) {
  const std::byte* const after = from + (count + 3) / 4;
  uint16_t narrow[2];
  std::memcpy(narrow, after, sizeof(narrow));
  const float wide[2] = {float_of(uint32_t{narrow[0]} << 16), float_of(uint32_t{narrow[1]} << 16)};
  for (size_t index = 0; index < count; ++index)
    values[index] = two_bit_value(static_cast<uint32_t>(from[index / 4]) >> (index % 4 * 2), wide);
  return after + sizeof(narrow);
}

// ---- Vectors

// Writes a chunk without what is sent of it. Where that passes by the caches, it is put together in them before.
template <class U, bool streamed>
void write_rest(const float* chunk, size_t length, const Positions& kept, const float* sent, float* residual) {
  float rest[codec_chunk];
  float* const to = streamed ? rest : residual;
  if (to != chunk) std::memcpy(to, chunk, length * sizeof(float));
  for (size_t index = 0; index < kept.count; ++index) to[kept.at[index]] -= sent[index];
  if constexpr (streamed)
    for (size_t at = 0; at < codec_chunk; at += U::lanes) U::stream(residual + at, U::read(rest + at));
}

// The least magnitude that threshold keeps: above `number` times the root mean square, or not finite.
template <class U>
int32_t least_kept(const float* chunk, size_t length, size_t number) {
  const double mean = ordered_sum<U, Square>(chunk, length) / static_cast<double>(length);
  const auto limit = static_cast<float>(__builtin_sqrt(mean) * static_cast<double>(number));
  const int32_t above = magnitude_of(limit) + 1;
  return limit != limit || above > infinity_bits ? infinity_bits : above;
}

template <class U>
std::byte* encode_chunk(const Codec& codec, const float* chunk, size_t length, std::byte* to, Positions& kept,
                        float* sent) {
  if (codec.kind == CodecKind::threshold) {
    list_at_least<U>(chunk, least_kept<U>(chunk, length, codec.number), kept);
    const auto count = static_cast<uint16_t>(kept.count);
    std::memcpy(to, &count, sizeof(count));
    return write_values(write_positions(to + sizeof(count), kept), chunk, kept, sent);
  }
  list_largest<U>(chunk, (length + codec.number - 1) / codec.number, kept);
  to = write_positions(to, kept);
  return codec.kind == CodecKind::topk ? write_values(to, chunk, kept, sent)
                                       : write_two_bits<U>(to, chunk, kept, sent);
}

template <class U>
size_t encode_sparse(const Codec& codec, const float* values, size_t count, std::byte* payload, float* residual) {
  const bool streamed = residual != nullptr && residual != values && is_streamed(residual, count);
  std::byte* to = payload;
  Positions kept;
  float sent[codec_chunk];
  for (size_t begin = 0; begin < count; begin += codec_chunk) {
    const size_t length = lesser(codec_chunk, count - begin);
    float padded[codec_chunk];
    const float* chunk = values + begin;
    if (length < codec_chunk) {  // zeros stand after all elements, and so are chosen after them
      std::memset(padded, 0, sizeof(padded));
      std::memcpy(padded, chunk, length * sizeof(float));
    }
    to = encode_chunk<U>(codec, length < codec_chunk ? padded : chunk, length, to, kept, sent);
    if (residual == nullptr) continue;
    if (streamed && length == codec_chunk)
      write_rest<U, true>(chunk, length, kept, sent, residual + begin);
    else
      write_rest<U, false>(chunk, length, kept, sent, residual + begin);
  }
  if (streamed) U::fence();
  return static_cast<size_t>(to - payload);
}

template <class Into>
bool decode_sparse(const Codec& codec, const std::byte* payload, size_t bytes, float* out, size_t count,
                   Into into) {
  const std::byte* const end = payload + bytes;
  Positions kept;
  float sent[codec_chunk];
  for (size_t begin = 0; begin < count; begin += codec_chunk) {
    const size_t length = lesser(codec_chunk, count - begin);
    size_t expected = (length + codec.number - 1) / codec.number;
    if (codec.kind == CodecKind::threshold) {
      uint16_t told;
      if (static_cast<size_t>(end - payload) < sizeof(told)) return false;
      std::memcpy(&told, payload, sizeof(told));
      payload += sizeof(told);
      expected = told;
      if (expected > length || static_cast<size_t>(end - payload) < bytes_of_positions(expected) + 4 * expected)
        return false;
    }
    if (!read_positions(payload, expected, length, kept)) return false;
    payload += bytes_of_positions(expected);
    if (codec.kind == CodecKind::topk_2bit) {
      payload = read_two_bits(payload, expected, sent);
    } else {
      std::memcpy(sent, payload, expected * sizeof(float));
      payload += expected * sizeof(float);
    }
    into(out + begin, length, kept, sent);
  }
  return true;
}

struct ReplaceKept {
  void operator()(float* out, size_t length, const Positions& kept, const float* sent) const {
    std::memset(out, 0, length * sizeof(float));
    for (size_t index = 0; index < kept.count; ++index) out[kept.at[index]] = sent[index];
  }
};

struct AddKept {
  float factor;
  void operator()(float* out, size_t, const Positions& kept, const float* sent) const {
    for (size_t index = 0; index < kept.count; ++index) out[kept.at[index]] += sent[index] * factor;
  }
};

}  // namespace
}  // namespace shoal
