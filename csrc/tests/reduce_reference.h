// The arithmetic of common/reduce.h as plain scalar code, to compare with the fast one.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "common/types.h"

namespace shoal::testing {

using Bytes = std::vector<unsigned char>;

// ---- float16 and bfloat16 by their definition: a number is a whole multiple of its binade's quantum.

struct HalfFormat {
  int mantissa_bits;
  int smallest_exponent;  // of a normal number
  int largest_exponent;
};
inline constexpr HalfFormat float16_format{10, -14, 15};
inline constexpr HalfFormat bfloat16_format{7, -126, 127};

inline float half_to_float(const HalfFormat& format, uint16_t bits) {
  const int field = (bits & 0x7fff) >> format.mantissa_bits;
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
  const int smallest_quantum = format.smallest_exponent - format.mantissa_bits;  // its exponent
  double magnitude;
  if (field == format.largest_exponent - format.smallest_exponent + 2)
    magnitude = mantissa == 0 ? INFINITY : NAN;
  else if (field == 0)
    magnitude = std::ldexp(mantissa, smallest_quantum);
  else
    magnitude = std::ldexp(mantissa + (1 << format.mantissa_bits), field - 1 + smallest_quantum);
  return static_cast<float>(bits & 0x8000 ? -magnitude : magnitude);
}

inline uint16_t float_to_half(const HalfFormat& format, float value) {
  const unsigned sign = std::signbit(value) ? 0x8000 : 0;
  const unsigned infinity = 0x7fff & ~((1u << format.mantissa_bits) - 1);
  const double magnitude = std::fabs(static_cast<double>(value));
  unsigned bits = 0;
  if (std::isnan(value)) {
    bits = infinity | 1;
  } else if (std::isinf(value)) {
    bits = infinity;
  } else if (magnitude > 0) {
    const int exponent = std::max(std::ilogb(magnitude), format.smallest_exponent);
    // nearbyint rounds to the nearest, ties to even: the mode that a program starts with.
    const double quanta = std::nearbyint(std::ldexp(magnitude, format.mantissa_bits - exponent));
    // A normal number's quanta include its leading one, which counts as a step of the exponent's field.
    const auto steps = static_cast<unsigned>(exponent - format.smallest_exponent);
    bits = std::min((steps << format.mantissa_bits) + static_cast<unsigned>(quanta), infinity);
  }
  return static_cast<uint16_t>(sign | bits);
}

// ---- Types: what lies in memory, and what it is computed in.

template <typename T>
struct PlainType {
  using Stored = T;
  using Folded = T;
  static T decode(T value) { return value; }
  static T encode(T value) { return value; }
};

template <const HalfFormat& format>
struct HalfType {
  using Stored = uint16_t;
  using Folded = float;
  static float decode(uint16_t bits) { return half_to_float(format, bits); }
  static uint16_t encode(float value) { return float_to_half(format, value); }
};
using Float16Type = HalfType<float16_format>;
using Bfloat16Type = HalfType<bfloat16_format>;

// Calls `use`, a template of the type's description.
template <typename Use>
void with_type(Dtype dtype, Use&& use) {
  switch (dtype) {
    case Dtype::float32:
      return use.template operator()<PlainType<float>>();
    case Dtype::float64:
      return use.template operator()<PlainType<double>>();
    case Dtype::float16:
      return use.template operator()<Float16Type>();
    case Dtype::bfloat16:
      return use.template operator()<Bfloat16Type>();
    case Dtype::int8:
      return use.template operator()<PlainType<int8_t>>();
    case Dtype::uint8:
      return use.template operator()<PlainType<uint8_t>>();
    case Dtype::int16:
      return use.template operator()<PlainType<int16_t>>();
    case Dtype::int32:
      return use.template operator()<PlainType<int32_t>>();
    case Dtype::int64:
      return use.template operator()<PlainType<int64_t>>();
    case Dtype::boolean:
      return use.template operator()<PlainType<bool>>();
  }
}

template <typename Type>
typename Type::Folded element(const Bytes& bytes, size_t index) {
  typename Type::Stored value;
  std::memcpy(&value, bytes.data() + index * sizeof value, sizeof value);
  return Type::decode(value);
}

template <typename Type>
void set_element(Bytes& bytes, size_t index, typename Type::Folded value) {
  const typename Type::Stored stored = Type::encode(value);
  std::memcpy(bytes.data() + index * sizeof stored, &stored, sizeof stored);
}

// ---- The fold

inline bool apply(Reduction op, bool a, bool b) {
  switch (op) {
    case Reduction::sum:
    case Reduction::maximum:
    case Reduction::bit_or:
      return a || b;
    case Reduction::bit_xor:
      return a != b;
    default:
      return a && b;
  }
}

template <typename T>
T apply(Reduction op, T a, T b) {
  if (op == Reduction::minimum) return a < b || a != a ? a : b;
  if (op == Reduction::maximum) return a > b || a != a ? a : b;
  if constexpr (std::is_floating_point_v<T>) {
    return op == Reduction::product ? a * b : a + b;
  } else {
    const auto x = static_cast<uint64_t>(a), y = static_cast<uint64_t>(b);  // cut to T again, these wrap
    switch (op) {
      case Reduction::product:
        return static_cast<T>(x * y);
      case Reduction::bit_and:
        return static_cast<T>(x & y);
      case Reduction::bit_or:
        return static_cast<T>(x | y);
      case Reduction::bit_xor:
        return static_cast<T>(x ^ y);
      default:
        return static_cast<T>(x + y);
    }
  }
}

// All elements of the first n inputs.
template <typename Type>
Bytes fold_reference(Reduction op, const std::vector<Bytes>& inputs, int n, int divisor) {
  Bytes result(inputs[0].size());
  for (size_t i = 0; i < result.size() / sizeof(typename Type::Stored); ++i) {
    auto total = element<Type>(inputs[0], i);
    for (int k = 1; k < n; ++k) total = apply(op, total, element<Type>(inputs[k], i));
    if (op == Reduction::average) total = static_cast<decltype(total)>(total / divisor);
    set_element<Type>(result, i, total);
  }
  return result;
}

}  // namespace shoal::testing
