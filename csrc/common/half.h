// Converts float16 and bfloat16 to float32 and back, a vector at a time, with arithmetic that every processor has.
//
// Conversion to float32 is exact. Conversion back rounds to the nearest, ties to even; numbers that are too large
// become infinity. A NaN stays one, keeps the upper bits of its payload and becomes quiet, as the processors' own
// instructions do it.
//
// How the bits lie, from the top:   sign   exponent (bias)   mantissa
//                      float32       1        8   (127)         23
//                      bfloat16      1        8   (127)          7
//                      float16       1        5    (15)         10
//
// A 16-bit number stands in the lower half of a 32-bit lane. The upper half is not read, and is written as zero.
#pragma once

#include "common/vectors.h"

namespace shoal {
namespace {

constexpr uint32_t float32_quiet = 0x00400000;  // the top bit of the mantissa, which marks a quiet NaN

// Rounds `bits` to the nearest, ties to even, for a caller that then drops the lowest `dropped` bits. A carry goes into
// the exponent, which is right: that is the next number up, or infinity after the largest.
template <int dropped, typename Bits>
inline Bits rounded_up(Bits bits) {
  constexpr uint32_t just_below_half = (1u << (dropped - 1)) - 1;
  return bits + just_below_half + ((bits >> dropped) & 1);
}

struct Bfloat16Format {
  template <typename Bits>
  static SameLanes<float, Bits> widen(Bits half) {
    return bits_as<SameLanes<float, Bits>>(half << 16);
  }

  template <typename Float>
  static SameLanes<uint32_t, Float> narrow(Float wide) {
    using Bits = SameLanes<uint32_t, Float>;
    const Bits bits = bits_as<Bits>(wide);
    // Rounding could carry a NaN over to the other sign, or cut its payload to infinity.
    return (wide != wide ? bits | float32_quiet : rounded_up<16>(bits)) >> 16;
  }
};

struct Float16Format {
  static constexpr uint32_t rebias = (127 - 15) << 23;  // from float16's exponent to float32's

  template <typename Bits>
  static SameLanes<float, Bits> widen(Bits half) {
    using Float = SameLanes<float, Bits>;
    using Signed = SameLanes<int32_t, Bits>;  // few processors compare unsigned numbers
    const Bits sign = (half & 0x8000) << 16;
    const Signed magnitude = bits_as<Signed>(half & 0x7fff);
    const Bits is_special = bits_as<Bits>(magnitude >= 0x7c00);  // infinity or NaN
    const Bits is_nan = bits_as<Bits>(magnitude > 0x7c00);

    // The largest exponent of one format becomes the largest of the other.
    const Bits moved = bits_as<Bits>(magnitude << 13) + rebias + (is_special & rebias);
    const Bits normal = moved | (is_nan & float32_quiet);
    // A subnormal number is its mantissa times 2^-24, and float32 holds that as a normal number.
    const Bits subnormal = bits_as<Bits>(__builtin_convertvector(magnitude, Float) * 0x1p-24f);
    return bits_as<Float>(sign | (magnitude < 0x0400 ? subnormal : normal));
  }

  template <typename Float>
  static SameLanes<uint32_t, Float> narrow(Float wide) {
    using Bits = SameLanes<uint32_t, Float>;
    using Signed = SameLanes<int32_t, Float>;
    constexpr int32_t smallest_normal = (127 - 14) << 23;  // 2^-14
    constexpr int32_t too_large = (127 + 16) << 23;        // 2^16; what lies just below rounds to infinity
    const Bits bits = bits_as<Bits>(wide);
    const Bits sign = (bits >> 16) & 0x8000;
    const Bits magnitude = bits & 0x7fffffff;
    const Signed ordered = bits_as<Signed>(magnitude);

    const Bits normal = rounded_up<13>(magnitude - rebias) >> 13;
    // The unit in the last place of numbers in [0.5, 1) is that of float16's subnormal numbers, 2^-24: adding
    // 0.5 rounds to it, and leaves the mantissa in the lowest bits.
    const Bits subnormal = bits_as<Bits>(bits_as<Float>(magnitude) + 0.5f) - (126u << 23);
    const Bits is_nan = bits_as<Bits>(wide != wide);
    const Bits special = 0x7c00 | (is_nan & (0x0200 | ((bits >> 13) & 0x03ff)));
    const Bits finite = ordered < smallest_normal ? subnormal : normal;
    return sign | (ordered < too_large ? finite : special);
  }
};

}  // namespace
}  // namespace shoal
