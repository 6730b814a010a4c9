// Sums in float64, added in one order on all vector units: that of `ordered_sum` in
// shoal/collectives/codecs/with_torch.py.
#pragma once

#include "codecs/lanes.h"

namespace shoal {
namespace {

struct Magnitude {
  template <class U>
  static typename U::Double of(typename U::Half values) {
    using Bits = SameLanes<uint32_t, typename U::Half>;
    return U::widen(bits_as<typename U::Half>(bits_as<Bits>(values) & magnitude_bits));
  }
};

struct Square {
  template <class U>
  static typename U::Double of(typename U::Half values) {
    const typename U::Double wide = U::widen(values);
    return wide * wide;
  }
};

// 32 lanes are summed over stretches of 16 rows, then over the stretches; the upper half of the lanes is added to the
// lower half until one is left. `Term` is what is summed of a value. Of the elements that
// many `ahead`, the even lines are fetched.
template <class U, class Term, size_t ahead = 0>
double ordered_sum(const float* values, size_t count) {
  constexpr size_t width = 32, stretch = 16, lanes = U::lanes / 2, parts = width / lanes;
  using Half = typename U::Half;
  using Double = typename U::Double;
  const size_t rows = (count + width - 1) / width;
  Double total[parts] = {};
  for (size_t begin = 0; begin < rows; begin += stretch) {
    Double sum[parts] = {};
    for (size_t row = begin; row < lesser(rows, begin + stretch); ++row) {
      const float* from = values + row * width;
      if constexpr (ahead > 0) fetch(from + ahead);
      float padded[width];
      if (count - row * width < width) {
        std::memset(padded, 0, sizeof(padded));
        std::memcpy(padded, from, (count - row * width) * sizeof(float));
        from = padded;
      }
      for (size_t p = 0; p < parts; ++p) {
        const Half half = load<Half>(reinterpret_cast<const std::byte*>(from + p * lanes));
        sum[p] += Term::template of<U>(half);
      }
    }
    for (size_t p = 0; p < parts; ++p) total[p] += sum[p];
  }
  for (size_t half = parts / 2; half > 0; half /= 2)
    for (size_t p = 0; p < half; ++p) total[p] += total[p + half];
  double lane[lanes];
  std::memcpy(lane, total, sizeof(lane));
  for (size_t half = lanes / 2; half > 0; half /= 2)
    for (size_t index = 0; index < half; ++index) lane[index] += lane[index + half];
  return lane[0];
}

}  // namespace
}  // namespace shoal
