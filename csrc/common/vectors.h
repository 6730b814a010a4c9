// Vectors of any number of bytes, written once for every vector unit with the compilers' vector extension.
//
// Nothing in this header, nor in those that include it, has linkage: each reduce_<unit>.cc includes them once it has
// chosen its instructions, and the linker must never replace the code of one file with that of another.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace shoal {
namespace {

template <typename T, size_t bytes>
struct VectorOf {
  typedef T Type __attribute__((vector_size(bytes)));
};

template <typename T, size_t lanes>
using Vector = typename VectorOf<T, lanes * sizeof(T)>::Type;

template <typename V>
using LaneOf = std::remove_cvref_t<decltype(std::declval<V&>()[0])>;

template <typename V>
inline constexpr size_t lanes_of = sizeof(V) / sizeof(LaneOf<V>);

// As many lanes as V has, of another type.
template <typename T, typename V>
using SameLanes = Vector<T, lanes_of<V>>;

// From any alignment, as below to any.
template <typename V>
inline V load(const std::byte* from) {
  V vector;
  std::memcpy(&vector, from, sizeof(V));
  return vector;
}

template <typename V>
inline void store(std::byte* to, V vector) {
  std::memcpy(to, &vector, sizeof(V));
}

// The same bits as lanes of another type.
template <typename To, typename From>
inline To bits_as(From vector) {
  static_assert(sizeof(To) == sizeof(From));
  return reinterpret_cast<To>(vector);
}

}  // namespace
}  // namespace shoal
