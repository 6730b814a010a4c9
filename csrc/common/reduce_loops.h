// The loops behind reduce.h, as templates over what an element is (reduce_elements.h) and what the operation
// is (reduce_operations.h), and the table of them that makes a vector unit.
//
// A Unit is a type with
//   width                          bytes in one of its vectors
//   Float16                        an element type of reduce_elements.h
//   StreamingStore, fence()        stores that pass by the caches, and the end of them; or neither
//   is_present()
#pragma once

#include "common/reduce_elements.h"
#include "common/reduce_operations.h"
#include "common/vector_unit.h"

namespace shoal {
namespace {

// One pass over memory, in which every input is read once and every result written once.
//
// Some vectors of the first input are loaded, those of each other input are folded into them, and they are
// written. What is left at the end is padded to whole vectors, so it is rounded like the rest. All inputs are
// read before their place in the result is written, so the result may replace any of them.
template <class Unit, class Element, class Operation>
class Fold {
 public:
  Fold(void* out, const void* const* inputs, int n, int divisor)
      : out_(static_cast<std::byte*>(out)), inputs_(inputs), n_(n), divisor_(divisor) {}

  // Elements [begin, end).
  template <class Store>
  void run(size_t begin, size_t end) const {
    constexpr size_t block = unrolled * step;
    size_t at = begin * sizeof(typename Element::Stored);
    const size_t stop = end * sizeof(typename Element::Stored);
    for (; stop - at >= block; at += block) fold_steps<unrolled, Store>(at);
    for (; stop - at >= step; at += step) fold_steps<1, Store>(at);
    if (at < stop) fold_rest(at, stop - at);
  }

 private:
  using Folded = typename Element::Folded;
  static constexpr size_t step = Unit::width;  // bytes
  static constexpr int unrolled = 4 / Folded::size;

  const std::byte* input(int k, size_t at) const { return static_cast<const std::byte*>(inputs_[k]) + at; }

  static void fold_in(Folded& total, Folded next) {
#pragma GCC unroll 2
    for (int p = 0; p < Folded::size; ++p) total.part[p] = Operation::apply(total.part[p], next.part[p]);
  }

  template <class Store>
  void finish(std::byte* to, Folded total) const {
#pragma GCC unroll 2
    for (int p = 0; p < Folded::size; ++p) total.part[p] = Operation::finish(total.part[p], divisor_);
    Element::template write<Store>(to, total);
  }

  template <int steps, class Store>
  void fold_steps(size_t at) const {
    std::byte* const to = out_ + at;
    const std::byte* from = input(0, at);
    Folded total[steps];
#pragma GCC unroll 4
    for (int s = 0; s < steps; ++s) total[s] = Element::read(from + s * step);
    for (int k = 1; k < n_; ++k) {
      from = input(k, at);
#pragma GCC unroll 4
      for (int s = 0; s < steps; ++s) fold_in(total[s], Element::read(from + s * step));
    }
#pragma GCC unroll 4
    for (int s = 0; s < steps; ++s) finish<Store>(to + s * step, total[s]);
  }

  void fold_rest(size_t at, size_t bytes) const {
    std::byte padded[step] = {};
    std::memcpy(padded, input(0, at), bytes);
    Folded total = Element::read(padded);
    for (int k = 1; k < n_; ++k) {
      std::memcpy(padded, input(k, at), bytes);
      fold_in(total, Element::read(padded));
    }
    finish<CachedStore>(padded, total);
    std::memcpy(out_ + at, padded, bytes);
  }

  std::byte* const out_;
  const void* const* const inputs_;
  const int n_;
  const int divisor_;
};

template <class Unit, class Element, class Operation>
void fold(void* out, const void* const* inputs, int n, size_t count, int divisor) {
  Fold<Unit, Element, Operation>(out, inputs, n, divisor).template run<CachedStore>(0, count);
}

// A copy is the fold of one input. Stores that pass by the caches must be aligned, and are fast where whole
// cache lines are written. So what lies before the first whole line is stored the usual way.
template <class Unit>
void copy(void* out, const void* in, size_t bytes) {
  const Fold<Unit, Plain<Unit, uint8_t>, BitOr> all(out, &in, 1, 1);
  if constexpr (requires { typename Unit::StreamingStore; }) {
    constexpr size_t line = 64;
    const size_t unaligned = -reinterpret_cast<uintptr_t>(out) % line;
    const size_t before = unaligned < bytes ? unaligned : bytes;
    all.template run<CachedStore>(0, before);
    all.template run<typename Unit::StreamingStore>(before, bytes);
    Unit::fence();
  } else {
    all.template run<CachedStore>(0, bytes);
  }
}

// ---- Conversions

template <class Halves>
void widen_all(float* out, const void* in, size_t count) {
  using Half = Vector<uint16_t, Halves::lanes>;
  const auto* from = static_cast<const std::byte*>(in);
  auto* to = reinterpret_cast<std::byte*>(out);
  for (; count >= Halves::lanes; count -= Halves::lanes, from += sizeof(Half), to += 2 * sizeof(Half))
    store(to, Halves::widen(load<Half>(from)));
  if (count == 0) return;
  Half rest{};
  std::memcpy(&rest, from, count * sizeof(uint16_t));
  const auto widened = Halves::widen(rest);
  std::memcpy(to, &widened, count * sizeof(float));
}

template <class Halves>
void narrow_all(void* out, const float* in, size_t count) {
  using Float = Vector<float, Halves::lanes>;
  const auto* from = reinterpret_cast<const std::byte*>(in);
  auto* to = static_cast<std::byte*>(out);
  for (; count >= Halves::lanes; count -= Halves::lanes, from += sizeof(Float), to += sizeof(Float) / 2)
    store(to, Halves::narrow(load<Float>(from)));
  if (count == 0) return;
  Float rest{};
  std::memcpy(&rest, from, count * sizeof(float));
  const auto narrowed = Halves::narrow(rest);
  std::memcpy(to, &narrowed, count * sizeof(uint16_t));
}

// ---- The tables

template <class Unit, class Element>
constexpr void add_arithmetic(FoldTable& table, Dtype dtype) {
  table.at(Reduction::sum, dtype) = fold<Unit, Element, Sum>;
  table.at(Reduction::minimum, dtype) = fold<Unit, Element, Minimum>;
  table.at(Reduction::maximum, dtype) = fold<Unit, Element, Maximum>;
  table.at(Reduction::product, dtype) = fold<Unit, Element, Product>;
}

template <class Unit, class Element>
constexpr void add_floating_point(FoldTable& table, Dtype dtype) {
  add_arithmetic<Unit, Element>(table, dtype);
  table.at(Reduction::average, dtype) = fold<Unit, Element, Average>;
}

template <class Unit>
constexpr FoldTable make_table() {
  FoldTable table;
  add_floating_point<Unit, Plain<Unit, float>>(table, Dtype::float32);
  add_floating_point<Unit, Plain<Unit, double>>(table, Dtype::float64);
  add_floating_point<Unit, typename Unit::Float16>(table, Dtype::float16);
  add_floating_point<Unit, PairedHalves<Unit, Bfloat16Format>>(table, Dtype::bfloat16);
  add_arithmetic<Unit, Plain<Unit, int8_t>>(table, Dtype::int8);
  add_arithmetic<Unit, Plain<Unit, uint8_t>>(table, Dtype::uint8);
  add_arithmetic<Unit, Plain<Unit, int16_t>>(table, Dtype::int16);
  add_arithmetic<Unit, Plain<Unit, int32_t>>(table, Dtype::int32);
  add_arithmetic<Unit, Plain<Unit, int64_t>>(table, Dtype::int64);
  using Bytes = Plain<Unit, uint8_t>;
  table.at(Reduction::bit_and, Dtype::uint8) = fold<Unit, Bytes, BitAnd>;
  table.at(Reduction::bit_or, Dtype::uint8) = fold<Unit, Bytes, BitOr>;
  table.at(Reduction::bit_xor, Dtype::uint8) = fold<Unit, Bytes, BitXor>;
  return table;
}

template <class Halves>
constexpr Conversion make_conversion() {
  return {widen_all<Halves>, narrow_all<Halves>};
}

template <class Unit>
constexpr VectorUnit make_vector_unit(const char* name) {
  VectorUnit unit{};
  unit.name = name;
  unit.is_present = Unit::is_present;
  unit.folds = make_table<Unit>();
  unit.copy = copy<Unit>;
  unit.float16 = make_conversion<typename Unit::Float16>();
  unit.bfloat16 = make_conversion<PairedHalves<Unit, Bfloat16Format>>();
  return unit;
}

}  // namespace
}  // namespace shoal
