// Element types: how `Unit::width` bytes of memory become the vectors that they are folded in, and how those
// are written back.
#pragma once

#include "common/half.h"
#include "common/vectors.h"

namespace shoal {
namespace {

// The vectors of one stretch of memory.
template <typename V, int count>
struct Parts {
  static constexpr int size = count;
  V part[count];
};

// Stores that the processor keeps in its caches. A unit may have another kind.
struct CachedStore {
  template <typename V>
  static void put(std::byte* to, V vector) {
    store(to, vector);
  }
};

// Folded as it lies.
template <class Unit, typename T>
struct Plain {
  using Stored = T;
  using Whole = Vector<T, Unit::width / sizeof(T)>;
  using Folded = Parts<Whole, 1>;

  static Folded read(const std::byte* from) { return {{load<Whole>(from)}}; }

  template <class Store>
  static void write(std::byte* to, Folded folded) {
    Store::put(to, folded.part[0]);
  }
};

// 16-bit numbers that are converted by arithmetic. Two of them lie in a 32-bit lane; the lower ones make one
// vector and the upper ones the other, which spares moving them across lanes.
template <class Unit, class Format>
struct PairedHalves {
  static constexpr size_t lanes = Unit::width / sizeof(float);
  using Stored = uint16_t;
  using Folded = Parts<Vector<float, lanes>, 2>;

  static Folded read(const std::byte* from) {
    const auto pairs = load<Vector<uint32_t, lanes>>(from);
    return {{Format::widen(pairs), Format::widen(pairs >> 16)}};
  }

  template <class Store>
  static void write(std::byte* to, Folded folded) {
    Store::put(to, Format::narrow(folded.part[0]) | (Format::narrow(folded.part[1]) << 16));
  }

  // Lane for lane.
  static Vector<float, lanes> widen(Vector<uint16_t, lanes> half) {
    return Format::widen(__builtin_convertvector(half, Vector<uint32_t, lanes>));
  }
  static Vector<uint16_t, lanes> narrow(Vector<float, lanes> wide) {
    return __builtin_convertvector(Format::narrow(wide), Vector<uint16_t, lanes>);
  }
};

// 16-bit numbers that the processor converts (`Instruction::widen`, `narrow`), half a vector to a whole one.
template <class Unit, class Instruction>
struct ConvertedHalves : Instruction {
  static constexpr size_t lanes = Unit::width / sizeof(float);
  using Stored = uint16_t;
  using Half = Vector<uint16_t, lanes>;
  using Folded = Parts<Vector<float, lanes>, 2>;

  static Folded read(const std::byte* from) {
    return {{Instruction::widen(load<Half>(from)), Instruction::widen(load<Half>(from + sizeof(Half)))}};
  }

  template <class Store>
  static void write(std::byte* to, Folded folded) {
    Store::put(to, Instruction::narrow(folded.part[0]));
    Store::put(to + sizeof(Half), Instruction::narrow(folded.part[1]));
  }
};

}  // namespace
}  // namespace shoal
