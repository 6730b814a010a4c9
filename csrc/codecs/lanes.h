// Vectors of a unit's width, and what is done with them that the compiler's vector extension can say. A unit replaces
// what its instructions do better. Nothing here has linkage, nor in the headers that include it (common/vectors.h says
// why); for the same reason they call no template of the standard library.
#pragma once

#include "common/vectors.h"

namespace shoal {
namespace {

constexpr uint32_t magnitude_bits = 0x7fffffff;
constexpr int32_t infinity_bits = 0x7f800000;
constexpr uint32_t nan_bits = 0x7fc00000;
constexpr float largest_float = 0x1.fffffep127f;

inline float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }
inline uint32_t bits_of(float value) { return __builtin_bit_cast(uint32_t, value); }
inline int32_t magnitude_of(float value) { return static_cast<int32_t>(bits_of(value) & magnitude_bits); }

template <typename V>
inline V all(LaneOf<V> value) {
  return V{} + value;
}

inline size_t lesser(size_t a, size_t b) { return a < b ? a : b; }

template <size_t width>
struct Lanes {
  static constexpr size_t lanes = width / 4;
  using Float = Vector<float, lanes>;
  using Int = Vector<int32_t, lanes>;
  using Bits = Vector<uint32_t, lanes>;
  using Long = Vector<uint64_t, lanes / 2>;
  using Half = Vector<float, lanes / 2>;
  using Double = Vector<double, lanes / 2>;

  static Float read(const float* from) { return load<Float>(reinterpret_cast<const std::byte*>(from)); }
  static void write(float* to, Float vector) { store(reinterpret_cast<std::byte*>(to), vector); }
  static void stream(float* to, Float vector) { write(to, vector); }
  static void fence() {}

  static Int magnitudes(Float vector) { return bits_as<Int>(bits_as<Bits>(vector) & magnitude_bits); }
  static Int larger(Int a, Int b) { return a > b ? a : b; }

  static Int smaller(Int a, Int b) { return a < b ? a : b; }

  static Int floor(Float vector) {
    const Int towards_zero = __builtin_convertvector(vector, Int);
    return towards_zero + (__builtin_convertvector(towards_zero, Float) > vector);
  }

  static Double widen(Half vector) { return __builtin_convertvector(vector, Double); }

  // A byte into every lane, without its sign or with it.
  static Int read_bytes(const std::byte* from) {
    return __builtin_convertvector(load<Vector<uint8_t, lanes>>(from), Int);
  }
  static Long read_long_bytes(const std::byte* from) {
    return __builtin_convertvector(load<Vector<uint8_t, lanes / 2>>(from), Long);
  }
  static Int read_signed_bytes(const std::byte* from) {
    return __builtin_convertvector(load<Vector<int8_t, lanes>>(from), Int);
  }

  // The lowest byte of every lane.
  static void write_bytes(std::byte* to, Int vector) {
    store(to, __builtin_convertvector(vector, Vector<uint8_t, lanes>));
  }
  static void write_bytes(std::byte* to, Long vector) {
    store(to, __builtin_convertvector(vector, Vector<uint8_t, lanes / 2>));
  }

  // A bit for each lane, the lowest for the first: whether it is negative, or at least some number.
  static uint32_t negatives(Int vector) {
    uint32_t bits = 0;
    for (size_t lane = 0; lane < lanes; ++lane) bits |= (static_cast<uint32_t>(vector[lane]) >> 31) << lane;
    return bits;
  }
  static uint32_t at_least(Int vector, int32_t least) { return negatives(vector >= least); }
};

// While a part of a vector is computed, a later part is fetched from memory, so that memory always has something to do:
// by those passes over a part that compute so much that the fetches do not queue.
constexpr size_t line_elements = 16;
constexpr size_t block_ahead = 3 * codec_block, chunk_ahead = codec_chunk;

// Fetches a cache line. (Were it not inlined at once, g++ would take it for a function that has no effect.)
[[gnu::always_inline]] inline void fetch(const float* line) { __builtin_prefetch(line); }

// 0, 1, 2, ...
template <class U>
inline typename U::Bits lane_numbers() {
  typename U::Bits numbers{};
  for (size_t lane = 0; lane < U::lanes; ++lane) numbers[lane] = static_cast<uint32_t>(lane);
  return numbers;
}

template <class U>
inline bool has_negative(typename U::Int vector) {
  return U::negatives(vector) != 0;
}

template <class U>
inline int32_t smallest_lane(typename U::Int vector) {
  int32_t smallest = vector[0];
  for (size_t lane = 1; lane < U::lanes; ++lane) smallest = vector[lane] < smallest ? vector[lane] : smallest;
  return smallest;
}

template <class U>
inline int32_t largest_lane(typename U::Int vector) {
  int32_t largest = vector[0];
  for (size_t lane = 1; lane < U::lanes; ++lane) largest = vector[lane] > largest ? vector[lane] : largest;
  return largest;
}

// Whether stores that pass by the caches gain: the vector does not stay in them, and lies at whole cache lines.
inline bool is_streamed(const float* to, size_t count) {
  constexpr size_t least_bytes = size_t{4} << 20;
  return count * sizeof(float) >= least_bytes && reinterpret_cast<uintptr_t>(to) % 64 == 0;
}

// To a place that `is_streamed` accepts, or the rest of one.
template <class U>
inline void stream_all(float* to, const float* from, size_t count) {
  size_t at = 0;
  for (; at < count && reinterpret_cast<uintptr_t>(to + at) % 64 != 0; ++at) to[at] = from[at];
  for (; at + U::lanes <= count; at += U::lanes) U::stream(to + at, U::read(from + at));
  for (; at < count; ++at) to[at] = from[at];
}

}  // namespace
}  // namespace shoal
