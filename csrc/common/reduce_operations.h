// The reductions, of two vectors at a time.
#pragma once

#include "common/vectors.h"

namespace shoal {
namespace {

// The lanes in which integers are added and multiplied, as the overflow of signed ones is undefined.
template <typename V>
using Wrapping = SameLanes<std::make_unsigned_t<LaneOf<V>>, V>;

// What is done to the result of all inputs: nothing, but by Average.
struct Unfinished {
  template <typename V>
  static V finish(V total, int) {
    return total;
  }
};

struct Sum : Unfinished {
  template <typename V>
  static V apply(V a, V b) {
    if constexpr (std::integral<LaneOf<V>>)
      return bits_as<V>(bits_as<Wrapping<V>>(a) + bits_as<Wrapping<V>>(b));
    else
      return a + b;
  }
};

struct Average {
  template <typename V>
  static V apply(V a, V b) {
    return Sum::apply(a, b);
  }
  template <typename V>
  static V finish(V total, int divisor) {
    return total / static_cast<LaneOf<V>>(divisor);
  }
};

struct Product : Unfinished {
  template <typename V>
  static V apply(V a, V b) {
    if constexpr (std::integral<LaneOf<V>>)
      return bits_as<V>(bits_as<Wrapping<V>>(a) * bits_as<Wrapping<V>>(b));
    else
      return a * b;
  }
};

// A comparison with NaN is false, which gives b: right where b is the NaN. `a != a` is true of NaN alone.
struct Minimum : Unfinished {
  template <typename V>
  static V apply(V a, V b) {
    if constexpr (std::integral<LaneOf<V>>)
      return a < b ? a : b;
    else
      return ((a < b) | (a != a)) ? a : b;
  }
};

struct Maximum : Unfinished {
  template <typename V>
  static V apply(V a, V b) {
    if constexpr (std::integral<LaneOf<V>>)
      return a > b ? a : b;
    else
      return ((a > b) | (a != a)) ? a : b;
  }
};

struct BitAnd : Unfinished {
  template <typename V>
  static V apply(V a, V b) {
    return a & b;
  }
};

struct BitOr : Unfinished {
  template <typename V>
  static V apply(V a, V b) {
    return a | b;
  }
};

struct BitXor : Unfinished {
  template <typename V>
  static V apply(V a, V b) {
    return a ^ b;
  }
};

}  // namespace
}  // namespace shoal
