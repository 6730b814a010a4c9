// Element-wise arithmetic on buffers, with the widest vectors that the processor has.
#pragma once

#include <cstddef>

#include "common/types.h"

namespace shoal {

// out[i] = inputs[0][i] (op) inputs[1][i] (op) ... (op) inputs[n - 1][i], folded in that order.
//
// float16 and bfloat16 are folded in float32 and rounded (to nearest, ties to even) once. `average` folds the sum and
// divides it by `divisor` before rounding. `minimum` and `maximum` give NaN where an input has NaN. On booleans sum,
// maximum and bit_or are "or"; product, minimum and bit_and are "and"; bit_xor is "xor". `out` may be one of the
// inputs; otherwise nothing overlaps. Pointers need no alignment beyond the element's. Results do not depend on which
// vector unit was used: all paths round in the same way and fold in the same order.
//
// Throws Failure(Code::invalid) for bit operations and average on types that have none: bit operations on floating
// point; average on integers and booleans, because their sums wrap, and most averages are not integers.
void combine(Dtype dtype, Reduction op, void* out, const void* const* inputs, int n, size_t count,
             int divisor = 1);

// Copies without leaving the destination in the caches, where the processor can.
void copy_streaming(void* out, const void* in, size_t bytes);

// float16 or bfloat16 to float32 (exact) and back (to nearest, ties to even; NaN stays NaN).
void widen(Dtype from, float* out, const void* in, size_t count);
void narrow(Dtype to, void* out, const float* in, size_t count);

// data[i] /= divisor, for an `average` whose sum was computed elsewhere.
void divide(Dtype dtype, void* data, size_t count, int divisor);

// Throws Failure(Code::invalid) unless the operation exists for the type.
void require_supported(Dtype dtype, Reduction op);

// The vector unit in use: "avx512", "avx2", "neon" or "portable"; and a function that sets it, for tests (false: not
// present).
const char* vector_unit();
bool force_vector_unit(const char* name);

}  // namespace shoal
