// Every type, reduction, number of inputs, length, alignment and aliasing, on every vector unit that the processor has,
// against scalar code. Results must have the reference's bits, so the units agree with one another too. Only the
// payload of a NaN may differ.
#include "common/reduce.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <random>
#include <string>

#include "tests/check.h"
#include "tests/reduce_reference.h"

namespace {

using namespace shoal;
using namespace shoal::testing;

constexpr int most_inputs = 5;
constexpr size_t longest = 1100;  // elements: several blocks of every unit, and a rest
constexpr Dtype all_dtypes[] = {Dtype::float32, Dtype::float64, Dtype::float16, Dtype::bfloat16,
                                Dtype::int8,    Dtype::uint8,   Dtype::int16,   Dtype::int32,
                                Dtype::int64,   Dtype::boolean};
constexpr Dtype floating_point[] = {Dtype::float32, Dtype::float64, Dtype::float16, Dtype::bfloat16};
constexpr Reduction all_reductions[] = {Reduction::sum,     Reduction::average, Reduction::minimum,
                                        Reduction::maximum, Reduction::product, Reduction::bit_and,
                                        Reduction::bit_or,  Reduction::bit_xor};

bool is_floating_point(Dtype dtype) { return dtype <= Dtype::bfloat16; }

bool is_supported(Dtype dtype, Reduction op) {
  if (op == Reduction::average) return is_floating_point(dtype);
  return op < Reduction::bit_and || !is_floating_point(dtype);
}

std::string describe(Dtype dtype, Reduction op, int n, size_t count) {
  return std::string(vector_unit()) + ", dtype " + text_of(dtype) + ", reduction " + text_of(op) + ", " +
         text_of(n) + " inputs of " + text_of(count);
}

// Any bits at all, which for floating point are numbers of any size, infinities and NaNs; every other
// floating-point number is of ordinary size, so that sums are more than their largest term.
template <typename Type>
Bytes random_elements(size_t count, std::mt19937_64& random) {
  using Folded = typename Type::Folded;
  Bytes bytes(count * sizeof(typename Type::Stored));
  for (auto& byte : bytes) byte = static_cast<unsigned char>(random());
  std::normal_distribution<double> ordinary;
  for (size_t i = 0; i < count; ++i) {
    if constexpr (std::is_same_v<Folded, bool>)
      bytes[i] &= 1;
    else if (std::is_floating_point_v<Folded> && random() % 2 == 0)
      set_element<Type>(bytes, i, static_cast<Folded>(ordinary(random)));
  }
  return bytes;
}

template <typename Type>
bool same_elements(const Bytes& found, const Bytes& wanted) {
  if (found == wanted) return true;
  if (found.size() != wanted.size()) return false;
  constexpr size_t size = sizeof(typename Type::Stored);
  for (size_t i = 0; i < found.size() / size; ++i) {
    const auto a = element<Type>(found, i), b = element<Type>(wanted, i);
    const bool both_nan = a != a && b != b;
    if (!both_nan && std::memcmp(&found[i * size], &wanted[i * size], size) != 0) return false;
  }
  return true;
}

// `shift` bytes, which move the rest against the alignment, and the last `bytes` of `data`: an allocation
// that ends with them, so that the address sanitizer sees a read that goes too far.
Bytes tail(const Bytes& data, size_t bytes, size_t shift) {
  Bytes result(shift);
  result.insert(result.end(), data.end() - static_cast<std::ptrdiff_t>(bytes), data.end());
  result.shrink_to_fit();
  return result;
}

// The fold of the last `count` elements, each buffer at an alignment of its own.
template <typename Type>
void check_tail(Dtype dtype, Reduction op, const std::vector<Bytes>& inputs, const Bytes& wanted, int n,
                size_t count, int divisor) {
  constexpr size_t size = sizeof(typename Type::Stored);
  const size_t bytes = count * size;
  const auto shift_of = [&](size_t k) {
    const size_t shift = (count + 7 * k) % 64;
    return k % 2 ? shift : shift / size * size;  // every other one off the element's own alignment as well
  };
  std::vector<Bytes> tails;
  std::vector<const void*> pointers;
  for (int k = 0; k < n; ++k) tails.push_back(tail(inputs[k], bytes, shift_of(k)));
  for (int k = 0; k < n; ++k) pointers.push_back(tails[k].data() + shift_of(k));

  constexpr unsigned char untouched = 0xa5;
  constexpr size_t margin = 64;
  const size_t begin = margin + shift_of(count % 3);
  Bytes out(begin + bytes + margin, untouched);
  combine(dtype, op, out.data() + begin, pointers.data(), n, count, divisor);
  const auto first = out.begin() + static_cast<std::ptrdiff_t>(begin);
  const auto last = out.end() - static_cast<std::ptrdiff_t>(margin);
  const bool right = same_elements<Type>(Bytes(first, last), tail(wanted, bytes, 0));
  CHECK(right);
  if (!right) std::fprintf(stderr, "%s\n", describe(dtype, op, n, count).c_str());
  CHECK(std::count(out.begin(), first, untouched) == first - out.begin());
  CHECK(std::count(last, out.end(), untouched) == out.end() - last);
}

template <typename Type>
void check_in_place(Dtype dtype, Reduction op, const std::vector<Bytes>& inputs, const Bytes& wanted,
                    int n, int divisor) {
  for (int target = 0; target < n; ++target) {
    std::vector<Bytes> copies(inputs.begin(), inputs.begin() + n);
    std::vector<const void*> pointers;
    for (const Bytes& copy : copies) pointers.push_back(copy.data());
    combine(dtype, op, copies[target].data(), pointers.data(), n, longest, divisor);
    CHECK(same_elements<Type>(copies[target], wanted));
  }
}

void folds_equal_the_reference() {
  std::mt19937_64 random(1);
  for (const Dtype dtype : all_dtypes)
    with_type(dtype, [&]<typename Type>() {
      std::vector<Bytes> inputs;
      for (int k = 0; k < most_inputs; ++k) inputs.push_back(random_elements<Type>(longest, random));
      for (const Reduction op : all_reductions) {
        if (!is_supported(dtype, op)) continue;
        for (int n = 1; n <= most_inputs; ++n) {
          const int divisor = n == 4 ? 300 : n;  // more than an int8 holds
          const Bytes wanted = fold_reference<Type>(op, inputs, n, divisor);
          for (size_t count = 0; count <= 300; ++count)
            check_tail<Type>(dtype, op, inputs, wanted, n, count, divisor);
          for (const size_t count : {511, 512, 513, 1000, 1100})
            check_tail<Type>(dtype, op, inputs, wanted, n, count, divisor);
          check_in_place<Type>(dtype, op, inputs, wanted, n, divisor);
        }
      }
    });
}

void many_and_large_inputs_are_folded() {
  constexpr int n = 19;
  constexpr size_t count = 100'003;
  std::mt19937_64 random(2);
  for (const Dtype dtype : {Dtype::float32, Dtype::bfloat16, Dtype::int16})
    with_type(dtype, [&]<typename Type>() {
      const Reduction op = is_floating_point(dtype) ? Reduction::average : Reduction::sum;
      std::vector<Bytes> inputs;
      std::vector<const void*> pointers;
      for (int k = 0; k < n; ++k) inputs.push_back(random_elements<Type>(count, random));
      for (const Bytes& input : inputs) pointers.push_back(input.data());
      const Bytes wanted = fold_reference<Type>(op, inputs, n, n);
      Bytes out(wanted.size());
      combine(dtype, op, out.data(), pointers.data(), n, count, n);
      CHECK(same_elements<Type>(out, wanted));
    });
}

// The fold of inputs that hold one value each: the first element, which is in a whole vector, and the last,
// which is in what is left.
template <typename Type>
std::vector<typename Type::Folded> fold_values(Dtype dtype, Reduction op,
                                               const std::vector<typename Type::Folded>& values) {
  std::vector<Bytes> inputs(values.size(), Bytes(longest * sizeof(typename Type::Stored)));
  std::vector<const void*> pointers;
  for (size_t k = 0; k < values.size(); ++k) {
    for (size_t i = 0; i < longest; ++i) set_element<Type>(inputs[k], i, values[k]);
    pointers.push_back(inputs[k].data());
  }
  Bytes out(inputs[0].size());
  combine(dtype, op, out.data(), pointers.data(), static_cast<int>(values.size()), longest);
  return {element<Type>(out, 0), element<Type>(out, longest - 1)};
}

void nan_wins_every_reduction_and_infinities_are_kept() {
  for (const Dtype dtype : floating_point)
    with_type(dtype, [&]<typename Type>() {
      using Folded = typename Type::Folded;
      if constexpr (std::is_floating_point_v<Folded>) {
        const Folded nan = std::numeric_limits<Folded>::quiet_NaN();
        const Folded infinity = std::numeric_limits<Folded>::infinity();
        const std::vector<std::vector<Folded>> with_nan{
            {nan, 1, 2}, {1, nan, 2}, {1, 2, nan}, {nan, nan}, {nan, infinity}, {-infinity, nan}, {nan}};
        for (const Reduction op : all_reductions) {
          if (!is_supported(dtype, op)) continue;
          for (const auto& values : with_nan)
            for (const Folded result : fold_values<Type>(dtype, op, values)) CHECK(std::isnan(result));
        }
        for (const Folded result : fold_values<Type>(dtype, Reduction::sum, {infinity, -infinity}))
          CHECK(std::isnan(result));
        for (const Folded result : fold_values<Type>(dtype, Reduction::sum, {1, infinity, 1}))
          CHECK_EQUAL(result, infinity);
        for (const Folded result : fold_values<Type>(dtype, Reduction::minimum, {1, -infinity, infinity}))
          CHECK_EQUAL(result, -infinity);
        for (const Folded result : fold_values<Type>(dtype, Reduction::maximum, {-infinity, 1, -infinity}))
          CHECK_EQUAL(result, Folded{1});
      }
    });
}

void halves_are_rounded_once() {
  // Each 1 alone is lost beside 2048 in float16, and beside 256 in bfloat16; together they are not.
  for (const float sum : fold_values<Float16Type>(Dtype::float16, Reduction::sum, {2048, 1, 1}))
    CHECK_EQUAL(sum, 2050.0f);
  for (const float sum : fold_values<Bfloat16Type>(Dtype::bfloat16, Reduction::sum, {256, 1, 1}))
    CHECK_EQUAL(sum, 258.0f);
}

void copies_are_copies() {
  std::mt19937_64 random(4);
  const Bytes source = random_elements<PlainType<uint8_t>>(70'000, random);
  for (const size_t bytes : {0, 1, 63, 64, 1000, 4095, 4096, 4097, 10'000, 65'536, 69'000})
    for (const size_t shift : {0, 1, 8, 33, 63}) {
      Bytes out(bytes + 128, 0xa5), wanted = out;
      std::copy_n(source.data() + 2 * shift, bytes, wanted.data() + shift);
      copy_streaming(out.data() + shift, source.data() + 2 * shift, bytes);
      CHECK(out == wanted);
    }
}

void floating_point_is_divided() {
  std::vector<float> floats{1, 2, -3};
  divide(Dtype::float32, floats.data(), floats.size(), 3);
  CHECK(floats == std::vector<float>({1.0f / 3, 2.0f / 3, -1}));
}

void what_has_no_meaning_is_refused() {
  for (const Dtype dtype : all_dtypes)
    for (const Reduction op : all_reductions) {
      unsigned char out[8] = {};
      const void* const input = out;
      if (is_supported(dtype, op)) {
        require_supported(dtype, op);
        continue;
      }
      CHECK_THROWS(require_supported(dtype, op), Code::invalid);
      CHECK_THROWS(combine(dtype, op, out, &input, 1, 1, 1), Code::invalid);
    }
  int32_t number = 7;
  CHECK_THROWS(divide(Dtype::int32, &number, 1, 2), Code::invalid);
}

void unknown_units_are_not_there() {
  const std::string before = vector_unit();
  CHECK(!force_vector_unit("abacus"));
  CHECK_EQUAL(before, vector_unit());
}

}  // namespace

int main() {
  int units = 0;
  for (const char* unit : {"portable", "neon", "avx2", "avx512"}) {
    if (!force_vector_unit(unit)) continue;
    CHECK_EQUAL(std::string(unit), vector_unit());
    ++units;
    folds_equal_the_reference();
    many_and_large_inputs_are_folded();
    nan_wins_every_reduction_and_infinities_are_kept();
    halves_are_rounded_once();
    copies_are_copies();
    floating_point_is_divided();
    what_has_no_meaning_is_refused();
    unknown_units_are_not_there();
  }
  CHECK(units > 0);
  return report();
}
