#include "algorithms/over_links.h"

#include <cstring>

#include "algorithms/execute.h"
#include "algorithms/schedules.h"
#include "common/reduce.h"

namespace shoal {

void OverLinks::run(const Operation& op, int divisor) {
  if (divisor == 0) divisor = size_;
  if (is_narrow(op.dtype) && passes_on_sums(op)) {
    run_narrow(op, divisor);
  } else {
    run_as_is(op, divisor);
  }
}

void OverLinks::run_narrow(const Operation& op, int divisor) {
  const auto parts = static_cast<size_t>(op.collective == Collective::reduce_scatter ? size_ : 1);
  const size_t count = op.bytes / size_of(op.dtype);
  wide_input_.resize(count * parts);
  wide_output_.resize(count);
  widen(op.dtype, wide_input_.data(), op.input, count * parts);
  Operation wide = op;
  wide.dtype = Dtype::float32;
  wide.bytes = count * sizeof(float);
  wide.input = wide_input_.data();
  wide.output = op.output == nullptr ? nullptr : wide_output_.data();
  run_as_is(wide, divisor);
  if (op.output != nullptr) narrow(op.dtype, op.output, wide_output_.data(), count);
}

void OverLinks::run_as_is(const Operation& op, int divisor) {
  const Schedule schedule = schedule_of(op, rank_, hierarchy_);
  if (scratch_.size() < schedule.scratch_bytes) scratch_.resize(schedule.scratch_bytes);
  const void* input = op.input;
  void* output = op.output;
  std::vector<std::byte> tokens;  // for a barrier: a byte of each rank
  if (op.collective == Collective::barrier) {
    tokens.resize(static_cast<size_t>(size_));
    input = output = tokens.data();
  }
  if (op.collective == Collective::all_reduce && input != output && op.bytes > 0) {
    std::memcpy(output, input, op.bytes);
  }
  execute(schedule, op.dtype, op.reduction, input, output, scratch_.data(), links_, alarm_, op.deadline,
          divisor);
  if (op.reduction == Reduction::average && passes_on_sums(op) && output != nullptr && op.bytes > 0) {
    divide(op.dtype, output, op.bytes / size_of(op.dtype), divisor);
  }
}

}  // namespace shoal
