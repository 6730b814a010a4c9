// Kinds that send the elements of each chunk that are largest: topk and threshold.
// shoal/collectives/codecs/with_torch.py describes payloads.
#pragma once

#include "codecs/largest.h"
#include "codecs/sums.h"

namespace shoal {
namespace {

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

// The nearest bfloat16 of a finite number; the largest one where that would be infinite.
inline uint16_t bfloat16_of(double mean) {
  constexpr uint32_t largest = 0x7f7f;
  const uint32_t bits = bits_of(static_cast<float>(mean));
  const uint32_t nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>(nearest < largest ? nearest : largest);
}

// The elements that two bits each and two magnitudes say; from the bytes of whole vectors.
template <class U>
void expand_two_bits(const std::byte* codes, size_t count, const float* magnitudes, float* values) {
  using Bits = typename U::Bits;
  for (size_t at = 0; at < count; at += U::lanes, codes += U::lanes / 4) {
    uint32_t packed = 0;
    std::memcpy(&packed, codes, U::lanes / 4);
    const Bits code = packed >> (lane_numbers<U>() * 2);
    const Bits magnitude =
        (code & 2) != 0 ? all<Bits>(bits_of(magnitudes[1])) : all<Bits>(bits_of(magnitudes[0]));
    U::write(values + at, bits_as<typename U::Float>(magnitude ^ (code << 31)));
  }
}

// The bits of a word, each followed by a 0.
inline uint32_t spread_bits(uint32_t word) {
  word = (word | (word << 8)) & 0x00ff00ff;
  word = (word | (word << 4)) & 0x0f0f0f0f;
  word = (word | (word << 2)) & 0x33333333;
  return (word | (word << 1)) & 0x55555555;
}

// The largest float32 that is not above a number: what is above one is above the other.
inline float rounded_down(double value) {
  const auto nearest = static_cast<float>(value);
  return static_cast<double>(nearest) > value ? float_of(bits_of(nearest) - 1) : nearest;
}

// Writes the codes of a chunk's kept elements, and makes their magnitudes into those of the smaller ones and those of
// the larger ones, with 0 for the others. Returns how many are larger than the mean.
template <class U>
size_t divide_at(double mean, const float* kept, size_t count, float* smaller, float* larger, std::byte* codes) {
  const float least = rounded_down(mean);
  size_t found = 0;
  for (size_t at = 0; at < count; at += U::lanes, codes += U::lanes / 4) {
    const auto magnitude = bits_as<typename U::Float>(U::magnitudes(U::read(kept + at)));
    const typename U::Int is_larger = magnitude > least;
    const typename U::Int bits = bits_as<typename U::Int>(magnitude);
    U::write(smaller + at, bits_as<typename U::Float>(bits & ~is_larger));
    U::write(larger + at, bits_as<typename U::Float>(bits & is_larger));
    const uint32_t larger_ones = U::negatives(is_larger);
    const uint32_t packed = spread_bits(U::negatives(U::read(kept + at) < 0.0f)) | (spread_bits(larger_ones) << 1);
    std::memcpy(codes, &packed, U::lanes / 4);
    found += static_cast<size_t>(__builtin_popcount(larger_ones));
  }
  return found;
}

// Two bits of each element, and two magnitudes.
template <class U>
std::byte* write_two_bits(std::byte* to, const float* chunk, const Positions& kept, float* sent) {
  const size_t count = kept.count, padded = (count + U::lanes - 1) / U::lanes * U::lanes;
  float values[codec_chunk / 2 + U::lanes], parts[2][codec_chunk / 2 + U::lanes];
  std::byte codes[codec_chunk / 8 + U::lanes];
  for (size_t index = 0; index < count; ++index) values[index] = chunk[kept.at[index]];
  for (size_t index = count; index < padded; ++index) values[index] = 0.0f;
  const double mean = ordered_sum<U, Magnitude>(values, count) / static_cast<double>(count);
  const size_t larger = divide_at<U>(mean, values, count, parts[0], parts[1], codes);
  const size_t counts[2] = {count - larger, larger};
  uint16_t narrow[2] = {nan_bits >> 16, nan_bits >> 16};
  float wide[2];
  for (size_t which = 0; which < 2; ++which) {
    const size_t divisor = counts[which] > 0 ? counts[which] : 1;
    const double sum = ordered_sum<U, Magnitude>(parts[which], count);
    if (magnitude_of(static_cast<float>(mean)) < infinity_bits)
      narrow[which] = bfloat16_of(sum / static_cast<double>(divisor));
    wide[which] = float_of(static_cast<uint32_t>(narrow[which]) << 16);
  }
  expand_two_bits<U>(codes, count, wide, sent);
  std::memcpy(to, codes, (count + 3) / 4);
  to += (count + 3) / 4;
  std::memcpy(to, narrow, sizeof(narrow));
  return to + sizeof(narrow);
}

template <class U>
const std::byte* read_two_bits(const std::byte* from, size_t count, float* values) {
  const size_t bytes = (count + 3) / 4;
  std::byte codes[codec_chunk / 4 + U::lanes];
  uint16_t narrow[2];
  std::memcpy(codes, from, bytes);
  std::memcpy(narrow, from + bytes, sizeof(narrow));
  const float wide[2] = {float_of(uint32_t{narrow[0]} << 16), float_of(uint32_t{narrow[1]} << 16)};
  expand_two_bits<U>(codes, count, wide, values);
  return from + bytes + sizeof(narrow);
}

// ---- Vectors

// The least magnitude that threshold keeps: above `number` times the root mean square, or not finite.
template <class U>
int32_t least_kept(const float* chunk, size_t length, size_t number) {
  const double mean = ordered_sum<U, Square, chunk_ahead>(chunk, length) / static_cast<double>(length);
  const auto limit = static_cast<float>(__builtin_sqrt(mean) * static_cast<double>(number));
  const int32_t above = magnitude_of(limit) + 1;
  return limit != limit || above > infinity_bits ? infinity_bits : above;
}

// Writes the payload of a chunk, with zeros after its elements, and says what is sent.
template <class U>
std::byte* encode_chunk(const Codec& codec, const float* chunk, size_t length, const float* residual,
                        std::byte* to, Positions& kept, float* sent) {
  if (codec.kind == CodecKind::threshold) {
    list_at_least<U>(chunk, least_kept<U>(chunk, length, codec.number), residual, kept);
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
    to = encode_chunk<U>(codec, length < codec_chunk ? padded : chunk, length,
                         residual == nullptr ? nullptr : residual + begin, to, kept, sent);
    if (residual != nullptr) write_rest(values + begin, length, kept, sent, residual + begin);
  }
  return static_cast<size_t>(to - payload);
}

template <class U, class Into>
bool decode_sparse(const Codec& codec, const std::byte* payload, size_t bytes, float* out, size_t count,
                   Into& into) {
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
      payload = read_two_bits<U>(payload, expected, sent);
    } else {
      std::memcpy(sent, payload, expected * sizeof(float));
      payload += expected * sizeof(float);
    }
    into(out + begin, length, kept, sent);
  }
  into.finish();
  return true;
}

}  // namespace
}  // namespace shoal
