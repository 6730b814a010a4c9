// Collectives, element types and reductions. The numbers are part of the C interface.
#pragma once

#include <cstddef>

namespace shoal {

enum class Collective : int {
  barrier = 0,
  all_reduce = 1,
  all_gather = 2,
  reduce_scatter = 3,
  broadcast = 4,
  reduce = 5,
  gather = 6,
  scatter = 7,
  all_to_all = 8,
};

enum class Dtype : int {
  float32 = 0,
  float64 = 1,
  float16 = 2,
  bfloat16 = 3,
  int8 = 4,
  uint8 = 5,
  int16 = 6,
  int32 = 7,
  int64 = 8,
  boolean = 9,  // one byte, 0 or 1
};

enum class Reduction : int {
  sum = 0,
  average = 1,  // the sum divided by the number of ranks; of floating point
  minimum = 2,
  maximum = 3,
  product = 4,
  bit_and = 5,
  bit_or = 6,
  bit_xor = 7,
};

// Whether a collective calculates with the elements; the others move bytes.
constexpr bool is_reducing(Collective collective) {
  return collective == Collective::all_reduce || collective == Collective::reduce ||
         collective == Collective::reduce_scatter;
}

constexpr size_t size_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::float64:
    case Dtype::int64:
      return 8;
    case Dtype::float32:
    case Dtype::int32:
      return 4;
    case Dtype::float16:
    case Dtype::bfloat16:
    case Dtype::int16:
      return 2;
    default:
      return 1;
  }
}

// Whether a type is a 16-bit float, whose sums are kept as float32.
constexpr bool is_narrow(Dtype dtype) { return dtype == Dtype::float16 || dtype == Dtype::bfloat16; }

}  // namespace shoal
