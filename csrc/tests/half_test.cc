// widen and narrow of common/reduce.h on every vector unit that the processor has, against the definition of the
// formats: all 65536 numbers one way, and every place where rounding changes direction the other way.
#include <algorithm>
#include <bit>
#include <cmath>
#include <random>
#include <vector>

#include "common/reduce.h"
#include "tests/check.h"
#include "tests/reduce_reference.h"

namespace {

using namespace shoal;
using namespace shoal::testing;

void check_conversions(Dtype dtype, const HalfFormat& format) {
  std::vector<uint16_t> halves(0x10000);
  for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<uint16_t>(i);
  std::vector<float> wide(halves.size());
  widen(dtype, wide.data(), halves.data(), halves.size());
  for (size_t i = 0; i < halves.size(); ++i) {
    const float wanted = half_to_float(format, halves[i]);
    CHECK(std::isnan(wanted) ? std::isnan(wide[i]) : std::memcmp(&wide[i], &wanted, sizeof wanted) == 0);
  }

  // Every 16-bit number, the numbers around it and around the middle to the next; then random ones.
  std::vector<float> numbers;
  for (size_t i = 0; i + 1 < wide.size(); ++i)
    for (const double number : {double{wide[i]}, (double{wide[i]} + double{wide[i + 1]}) / 2}) {
      const float nearest = static_cast<float>(number);
      for (const float toward : {-INFINITY, nearest, INFINITY})
        numbers.push_back(std::nextafter(nearest, toward));
    }
  std::mt19937 random(1);
  for (int i = 0; i < 100'000; ++i) numbers.push_back(std::bit_cast<float>(static_cast<uint32_t>(random())));
  std::vector<uint16_t> narrowed(numbers.size());
  narrow(dtype, narrowed.data(), numbers.data(), numbers.size());
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (std::isnan(numbers[i]))
      CHECK(std::isnan(half_to_float(format, narrowed[i])));
    else
      CHECK_EQUAL(narrowed[i], float_to_half(format, numbers[i]));
  }
}

void conversions_are_exact_or_to_the_nearest() {
  check_conversions(Dtype::float16, float16_format);
  check_conversions(Dtype::bfloat16, bfloat16_format);
}

void conversions_stay_within_their_count() {
  for (const Dtype dtype : {Dtype::float16, Dtype::bfloat16})
    for (size_t count = 0; count <= 70; ++count) {
      const std::vector<uint16_t> halves(count, 0x4000);  // 2 in both formats
      std::vector<float> wide(count + 1, -1);
      widen(dtype, wide.data(), halves.data(), count);
      CHECK(std::count(wide.begin(), wide.end() - 1, 2.0f) == static_cast<std::ptrdiff_t>(count));
      CHECK_EQUAL(wide.back(), -1.0f);

      const std::vector<float> floats(count, 2);
      std::vector<uint16_t> narrowed(count + 1, 0xa5a5);
      narrow(dtype, narrowed.data(), floats.data(), count);
      CHECK(std::count(narrowed.begin(), narrowed.end() - 1, 0x4000) == static_cast<std::ptrdiff_t>(count));
      CHECK_EQUAL(narrowed.back(), 0xa5a5);
    }
}

}  // namespace

int main() {
  for (const char* unit : {"portable", "neon", "avx2", "avx512"}) {
    if (!force_vector_unit(unit)) continue;
    conversions_are_exact_or_to_the_nearest();
    conversions_stay_within_their_count();
  }
  return report();
}
