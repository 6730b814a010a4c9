#include "common/reduce.h"

#include <cassert>
#include <cstring>
#include <string>

#include "common/error.h"
#include "common/vector_unit.h"

namespace shoal {
namespace {

bool is_floating_point(Dtype dtype) {
  return dtype == Dtype::float32 || dtype == Dtype::float64 || dtype == Dtype::float16 ||
         dtype == Dtype::bfloat16;
}

bool is_bitwise(Reduction op) {
  return op == Reduction::bit_and || op == Reduction::bit_or || op == Reduction::bit_xor;
}

const char* name_of(Dtype dtype) {
  constexpr const char* names[dtype_count] = {"float32", "float64", "float16", "bfloat16", "int8",
                                              "uint8",   "int16",   "int32",   "int64",    "boolean"};
  return names[static_cast<int>(dtype)];
}

// The requested reduction, in terms of the existing kernels.
struct Task {
  Dtype dtype;
  Reduction op;
  size_t count;
};

// Booleans are bytes with bit operations, and these do not depend on the type of the bits.
Task simplest_form(Dtype dtype, Reduction op, size_t count) {
  if (dtype == Dtype::boolean) {
    if (op == Reduction::sum || op == Reduction::maximum) op = Reduction::bit_or;
    if (op == Reduction::product || op == Reduction::minimum) op = Reduction::bit_and;
  }
  if (is_bitwise(op)) return {Dtype::uint8, op, count * size_of(dtype)};
  return {dtype, op, count};
}

const Conversion& conversion_of(Dtype dtype) {
  assert(is_narrow(dtype));
  const VectorUnit& unit = current_vector_unit();
  return dtype == Dtype::float16 ? unit.float16 : unit.bfloat16;
}

}  // namespace

void combine(Dtype dtype, Reduction op, void* out, const void* const* inputs, int n, size_t count,
             int divisor) {
  require_supported(dtype, op);
  assert(n >= 1 && divisor >= 1);
  const Task task = simplest_form(dtype, op, count);
  const FoldKernel fold = current_vector_unit().folds.at(task.op, task.dtype);
  fold(out, inputs, n, task.count, divisor);
}

void copy_streaming(void* out, const void* in, size_t bytes) { current_vector_unit().copy(out, in, bytes); }

void widen(Dtype from, float* out, const void* in, size_t count) {
  conversion_of(from).widen(out, in, count);
}

void narrow(Dtype to, void* out, const float* in, size_t count) {
  conversion_of(to).narrow(out, in, count);
}

// Divides sums by the divisor, for an average.
void divide(Dtype dtype, void* data, size_t count, int divisor) {
  const void* sum = data;
  combine(dtype, Reduction::average, data, &sum, 1, count, divisor);
}

void require_supported(Dtype dtype, Reduction op) {
  if (is_bitwise(op) && is_floating_point(dtype))
    throw Failure(Code::invalid, -1,
                  std::string("bit operations are for integers and booleans, not for ") + name_of(dtype));
  if (op == Reduction::average && !is_floating_point(dtype))
    throw Failure(Code::invalid, -1, std::string("averages are for floating point, not for ") + name_of(dtype));
}

const char* vector_unit() { return current_vector_unit().name; }

bool force_vector_unit(const char* name) { return use_vector_unit(name); }

}  // namespace shoal
