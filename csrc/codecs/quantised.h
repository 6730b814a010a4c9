// Kinds that send every element in fewer bits. shoal/collectives/codecs/with_torch.py describes payloads and rounding.
//
// A Format has
//   bits                          of an element
//   scale_of(values, count)       of a block
//   has_zero_codes(scale)         whether the scale is 0 or NaN: all codes are those of 0
//   Coded                         a vector of codes; it may know more of them, for what they are decoded to
//   coded(values, scale, random)
//   codes(coded)                  in the lowest bits of their lanes
//   decoded(coded or codes, scale)
//   write(to, at, codes)          packs the codes of the elements from `at` on, in order
//   read(from, at)                unpacks them
#pragma once

#include "codecs/random_bits.h"
#include "codecs/sums.h"

namespace shoal {
namespace {

// The largest magnitude of a block; infinity_bits or more where an element is not finite.
template <class U>
int32_t peak_of(const float* values, size_t count) {
  constexpr size_t step = 4 * U::lanes;
  typename U::Int peak[4] = {};
  for (size_t at = 0; at < count; at += step) {
#pragma GCC unroll 4
    for (size_t p = 0; p < 4; ++p)
      peak[p] = U::larger(peak[p], U::magnitudes(U::read(values + at + p * U::lanes)));
  }
  return largest_lane<U>(U::larger(U::larger(peak[0], peak[1]), U::larger(peak[2], peak[3])));
}

// The largest scale of which `largest` times is no more than the largest float32.
constexpr float most_scale(int largest) {
  const auto most = static_cast<float>(double{largest_float} / largest);
  return double{most} * largest > double{largest_float} ? __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, most) - 1)
                                                        : most;
}

template <class U, int largest>
struct ScaledByPeak {
  static float scale_of(const float* values, size_t) {
    const int32_t peak = peak_of<U>(values, codec_block);
    if (peak >= infinity_bits) return float_of(nan_bits);
    const float scale = float_of(static_cast<uint32_t>(peak)) / largest;
    return scale < most_scale(largest) ? scale : most_scale(largest);
  }
  static bool has_zero_codes(float scale) { return !(scale > 0.0f); }
};

template <class U, int largest, int zero>
struct Integers : ScaledByPeak<U, largest> {
  using Coded = typename U::Int;
  static Coded coded(typename U::Float values, float scale, RandomVectors<U>& random) {
    const typename U::Int rounded = U::floor(values / scale + uniform<U>(random.next()));
    return U::smaller(U::larger(rounded, all<typename U::Int>(-largest)), all<typename U::Int>(largest)) + zero;
  }
  static typename U::Int codes(Coded coded) { return coded; }
  static typename U::Float decoded(typename U::Int codes, float scale) {
    return __builtin_convertvector(codes - zero, typename U::Float) * scale;
  }
};

template <class U>
struct Int8 : Integers<U, 127, 0> {
  static constexpr size_t bits = 8;
  static void write(std::byte* to, size_t at, typename U::Int codes) { U::write_bytes(to + at, codes); }
  static typename U::Int read(const std::byte* from, size_t at) {
    return U::read_signed_bytes(from + at);
  }
};

template <class U>
struct Int4 : Integers<U, 7, 8> {
  static constexpr size_t bits = 4;
  // Two lanes make one of 64 bits, whose lowest byte gets both codes.
  static void write(std::byte* to, size_t at, typename U::Int codes) {
    const auto pairs = bits_as<typename U::Long>(codes);
    U::write_bytes(to + at / 2, pairs | (pairs >> 28));
  }
  static typename U::Int read(const std::byte* from, size_t at) {
    const typename U::Long pairs = U::read_long_bytes(from + at / 2);
    return bits_as<typename U::Int>((pairs | (pairs << 28)) & 0x0000000f0000000f);
  }
};

// e4m3: 4 bits of exponent (bias 7), 3 of mantissa, so 20 bits less of mantissa than float32. Random bits are added to
// those, and carry at random. Below the smallest normal number, 2^-6, numbers are multiples of 2^-9.
template <class U>
struct Fp8 : ScaledByPeak<U, 448> {
  static constexpr size_t bits = 8;
  static constexpr uint32_t rebias = (127 - 7) << 3;

  static constexpr uint32_t below_mantissa = 0xfffff;

  // The bits of rounded magnitudes, of which those below the mantissa do not count, are decoded in fewer operations
  // than codes.
  struct Coded {
    typename U::Int magnitudes, rounded;
    typename U::Bits signs;
  };
  static Coded coded(typename U::Float values, float scale, RandomVectors<U>& random) {
    using Int = typename U::Int;
    using Float = typename U::Float;
    using Bits = typename U::Bits;
    const auto grid = bits_as<Bits>(values / scale);
    const Bits magnitude = grid & magnitude_bits;
    const Bits drawn = random.next();
    const auto most = all<Int>(static_cast<int32_t>(bits_of(448.0f) | below_mantissa));
    Int rounded = U::smaller(bits_as<Int>(magnitude + (drawn >> 12)), most);
    Int code = (rounded >> 20) - static_cast<int32_t>(rebias);
    const auto size = bits_as<Float>(magnitude);
    const Int is_subnormal = size < 0x1p-6f;
    if (has_negative<U>(is_subnormal)) {  // seldom
      const Int subnormal = U::floor(size * 0x1p9f + uniform<U>(drawn));
      code = is_subnormal ? subnormal : code;
      const auto decoded = bits_as<Int>(__builtin_convertvector(subnormal, Float) * 0x1p-9f);
      rounded = is_subnormal ? decoded : rounded;
    }
    return {code, rounded, grid & ~magnitude_bits};
  }
  static typename U::Int codes(const Coded& coded) {
    return coded.magnitudes | bits_as<typename U::Int>(coded.signs >> 24);
  }
  static typename U::Float decoded(const Coded& coded, float scale) {
    const auto sizes = bits_as<typename U::Bits>(coded.rounded) & ~below_mantissa;
    return bits_as<typename U::Float>(sizes | coded.signs) * scale;
  }
  static typename U::Float decoded(typename U::Int codes, float scale) {
    using Float = typename U::Float;
    using Bits = typename U::Bits;
    const typename U::Int magnitude = codes & 0x7f;
    Bits size = bits_as<Bits>((magnitude + static_cast<int32_t>(rebias)) << 20);
    const typename U::Int is_subnormal = magnitude < 8;
    if (has_negative<U>(is_subnormal)) {
      const auto subnormal = bits_as<Bits>(__builtin_convertvector(magnitude, Float) * 0x1p-9f);
      size = is_subnormal ? subnormal : size;
    }
    return bits_as<Float>(size | ((bits_as<Bits>(codes) & 0x80) << 24)) * scale;
  }
  static void write(std::byte* to, size_t at, typename U::Int codes) { U::write_bytes(to + at, codes); }
  static typename U::Int read(const std::byte* from, size_t at) {
    return U::read_bytes(from + at);
  }
};

// Its codes have the sign's bit at the top of a lane.
template <class U>
struct Sign {
  static constexpr size_t bits = 1;

  static float scale_of(const float* values, size_t count) {
    const double sum = ordered_sum<U, Magnitude, block_ahead>(values, count);  // finite if all elements are
    const auto mean = static_cast<float>(sum / static_cast<double>(count));
    return magnitude_of(mean) >= infinity_bits ? float_of(nan_bits) : mean;
  }
  static bool has_zero_codes(float) { return false; }
  using Coded = typename U::Int;
  static Coded coded(typename U::Float values, float, RandomVectors<U>&) {
    return bits_as<typename U::Int>(values < 0.0f) & static_cast<int32_t>(~magnitude_bits);
  }
  static typename U::Int codes(Coded coded) { return coded; }
  static typename U::Float decoded(typename U::Int codes, float scale) {
    return bits_as<typename U::Float>(bits_as<typename U::Bits>(codes) ^ bits_of(scale));
  }
  static void write(std::byte* to, size_t at, typename U::Int codes) {
    const uint32_t packed = U::negatives(codes);
    if constexpr (U::lanes >= 8)
      std::memcpy(to + at / 8, &packed, U::lanes / 8);
    else
      to[at / 8] = (at % 8 == 0 ? std::byte{} : to[at / 8]) | static_cast<std::byte>(packed << at % 8);
  }
  static typename U::Int read(const std::byte* from, size_t at) {
    uint32_t packed = 0;
    std::memcpy(&packed, from + at / 8, (U::lanes + 7) / 8);
    const typename U::Bits is_set = ((packed >> at % 8) >> lane_numbers<U>()) & 1;
    return bits_as<typename U::Int>(is_set << 31);
  }
};

// ---- Vectors

// Later blocks are fetched from memory while this one is computed.
template <class U, class Format, bool is_zero, bool streamed>
void encode_block(const float* values, float scale, RandomKeys keys, size_t index, std::byte* to,
                  float* residual) {
  RandomVectors<U> random(keys, index);
#pragma GCC unroll 2
  for (size_t at = 0; at < codec_block; at += U::lanes) {
    if (at % line_elements == 0) fetch(values + at + block_ahead);
    const typename U::Float vector = U::read(values + at);
    const typename Format::Coded coded =
        is_zero ? Format::coded(typename U::Float{}, 1.0f, random) : Format::coded(vector, scale, random);
    Format::write(to, at, Format::codes(coded));
    if (residual == nullptr) continue;
    const typename U::Float rest = vector - Format::decoded(coded, scale);
    if constexpr (streamed)
      U::stream(residual + at, rest);
    else
      U::write(residual + at, rest);
  }
}

template <class U, class Format, bool streamed>
float encode_whole_block(const float* values, size_t size, RandomKeys keys, size_t index, std::byte* to,
                         float* residual) {
  const float scale = Format::scale_of(values, size);
  if (Format::has_zero_codes(scale))
    encode_block<U, Format, true, streamed>(values, scale, keys, index, to, residual);
  else
    encode_block<U, Format, false, streamed>(values, scale, keys, index, to, residual);
  return scale;
}

// The last block, padded with zeros. Bits of its last byte that have no element are 0.
template <class U, class Format>
float encode_last_block(const float* values, size_t size, RandomKeys keys, size_t index, std::byte* to,
                        float* residual) {
  float padded[codec_block] = {};
  std::byte coded[codec_block * Format::bits / 8];
  std::memcpy(padded, values, size * sizeof(float));
  float* const rest = residual == nullptr ? nullptr : padded;
  const float scale = encode_whole_block<U, Format, false>(padded, size, keys, index, coded, rest);
  const size_t bytes = (size * Format::bits + 7) / 8, used = size * Format::bits % 8;
  if (used != 0) coded[bytes - 1] &= static_cast<std::byte>((1u << used) - 1);
  std::memcpy(to, coded, bytes);
  if (residual != nullptr) std::memcpy(residual, padded, size * sizeof(float));
  return scale;
}

template <class U, class Format>
size_t encode_quantised(const Codec& codec, const float* values, size_t count, std::byte* payload,
                        float* residual) {
  const RandomKeys keys = keys_of(codec.seed);
  const bool streamed = residual != nullptr && residual != values && is_streamed(residual, count);
  std::byte* scales = payload;
  std::byte* codes = payload + (count + codec_block - 1) / codec_block * sizeof(float);
  std::byte* const end = codes + (count * Format::bits + 7) / 8;
  for (size_t at = 0; at < count; at += codec_block) {
    const size_t size = lesser(codec_block, count - at);
    const auto encode = size < codec_block ? encode_last_block<U, Format>
                        : streamed         ? encode_whole_block<U, Format, true>
                                           : encode_whole_block<U, Format, false>;
    const float scale =
        encode(values + at, size, keys, at, codes, residual == nullptr ? nullptr : residual + at);
    std::memcpy(scales, &scale, sizeof(float));
    scales += sizeof(float);
    codes += codec_block * Format::bits / 8;
  }
  if (streamed) U::fence();
  return static_cast<size_t>(end - payload);
}

// What is done with a decoded vector.
template <class U>
struct Replace {
  static constexpr bool may_stream = true;
  typename U::Float operator()(const float*, typename U::Float decoded) const { return decoded; }
};

template <class U>
struct Add {
  static constexpr bool may_stream = false;
  float factor;
  typename U::Float operator()(const float* out, typename U::Float decoded) const {
    return U::read(out) + decoded * factor;
  }
};

template <class U, class Format, bool streamed, class Into>
void decode_block(const std::byte* codes, float scale, float* out, Into into) {
  for (size_t at = 0; at < codec_block; at += U::lanes) {
    const auto result = into(out + at, Format::decoded(Format::read(codes, at), scale));
    if constexpr (streamed)
      U::stream(out + at, result);
    else
      U::write(out + at, result);
  }
}

template <class U, class Format, class Into>
bool decode_quantised(const std::byte* payload, float* out, size_t count, Into into) {
  const bool streamed = Into::may_stream && is_streamed(out, count);
  const std::byte* codes = payload + (count + codec_block - 1) / codec_block * sizeof(float);
  for (size_t at = 0; at < count; at += codec_block, payload += sizeof(float)) {
    const size_t size = lesser(codec_block, count - at);
    float scale;
    std::memcpy(&scale, payload, sizeof(float));
    if (size < codec_block) {
      float padded[codec_block] = {};
      std::byte coded[codec_block * Format::bits / 8] = {};
      std::memcpy(coded, codes, (size * Format::bits + 7) / 8);
      std::memcpy(padded, out + at, size * sizeof(float));
      decode_block<U, Format, false>(coded, scale, padded, into);
      std::memcpy(out + at, padded, size * sizeof(float));
    } else if (streamed) {
      decode_block<U, Format, true>(codes, scale, out + at, into);
    } else {
      decode_block<U, Format, false>(codes, scale, out + at, into);
    }
    codes += codec_block * Format::bits / 8;
  }
  if (streamed) U::fence();
  return true;
}

}  // namespace
}  // namespace shoal
