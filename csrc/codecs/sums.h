// Sums in float64, added in one order on all vector units: that of `ordered_sum` in
// shoal/collectives/codecs/rows.py.
#pragma once

#include "codecs/lanes.h"

namespace shoal {
namespace {

struct Magnitude {
  template <typename V>
  static V of(V value) {
    return value < 0.0 ? -value : value;
  }
};

struct Square {
  template <typename V>
  static V of(V value) {
    return value * value;
  }
};

// 32 lanes are summed over stretches of 16 rows, then over the stretches; the upper half of the lanes is added to the
// lower half until one is left. `Term` is what is summed of a value.
template <class U, class Term>
double ordered_sum(const float* values, size_t count) {
  constexpr size_t width = 32, stretch = 16, lanes = U::lanes / 2, parts = width / lanes;
  using Half = Vector<float, lanes>;
  using Double = Vector<double, lanes>;
  const size_t rows = (count + width - 1) / width;
  Double total[parts] = {};
  for (size_t begin = 0; begin < rows; begin += stretch) {
    Double sum[parts] = {};
    for (size_t row = begin; row < lesser(rows, begin + stretch); ++row) {
      const float* from = values + row * width;
      float padded[width] = {};
      if (count - row * width < width) {
        std::memcpy(padded, from, (count - row * width) * sizeof(float));
        from = padded;
      }
      for (size_t p = 0; p < parts; ++p) {
        const Half half = load<Half>(reinterpret_cast<const std::byte*>(from + p * lanes));
        sum[p] += Term::of(__builtin_convertvector(half, Double));
      }
    }
    for (size_t p = 0; p < parts; ++p) total[p] += sum[p];
  }
  double lane[width];
  std::memcpy(lane, total, sizeof(lane));
  for (size_t half = width / 2; half > 0; half /= 2)
    for (size_t index = 0; index < half; ++index) lane[index] += lane[index + half];
  return lane[0];
}

}  // namespace
}  // namespace shoal
