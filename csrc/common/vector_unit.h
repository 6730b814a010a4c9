// The vector units that the arithmetic of reduce.h is compiled for, and which of them is used.
//
// Each is one file, reduce_<unit>.cc, that compiles the same loops (reduce_loops.h) for its instructions.
#pragma once

#include <cstddef>

#include "common/types.h"

namespace shoal {

inline constexpr int dtype_count = static_cast<int>(Dtype::boolean) + 1;
inline constexpr int reduction_count = static_cast<int>(Reduction::bit_xor) + 1;

// Folds n inputs into `out`; `divisor` is read by `average` alone.
using FoldKernel = void (*)(void* out, const void* const* inputs, int n, size_t count, int divisor);

// Null where `simplest_form` (reduce.cc) sends a pair to the kernel of another one, or `require_supported` refuses it.
struct FoldTable {
  FoldKernel kernels[reduction_count][dtype_count] = {};

  constexpr FoldKernel& at(Reduction op, Dtype dtype) {
    return kernels[static_cast<int>(op)][static_cast<int>(dtype)];
  }
  constexpr FoldKernel at(Reduction op, Dtype dtype) const {
    return kernels[static_cast<int>(op)][static_cast<int>(dtype)];
  }
};

// A 16-bit floating-point format, to float32 and back.
struct Conversion {
  void (*widen)(float* out, const void* in, size_t count);
  void (*narrow)(void* out, const float* in, size_t count);
};

struct VectorUnit {
  const char* name;
  bool (*is_present)();  // on the processor that runs this
  FoldTable folds;
  void (*copy)(void* out, const void* in, size_t bytes);  // past the caches, where the unit can
  Conversion float16;
  Conversion bfloat16;
};

extern const VectorUnit portable_unit;
#if defined(__x86_64__)
extern const VectorUnit avx2_unit;
extern const VectorUnit avx512_unit;
#elif defined(__aarch64__)
extern const VectorUnit neon_unit;
#endif

// The widest unit of this processor, unless `use_vector_unit` chose another.
const VectorUnit& current_vector_unit();

// False, and nothing changes, if this processor has no unit of that name.
bool use_vector_unit(const char* name);

}  // namespace shoal
