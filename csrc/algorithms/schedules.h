// From an operation to its schedule over links.
#pragma once

#include "algorithms/hierarchical.h"
#include "algorithms/operation.h"
#include "algorithms/schedule.h"

namespace shoal {

// The most bytes of a step, where large regions are cut into chunks.
constexpr size_t chunk_limit = 256 * 1024;

// The schedule of `rank`. For an all-reduce the output holds the input already.
// Throws Failure(Code::invalid) if the collective has no such algorithm.
Schedule schedule_of(const Operation& operation, int rank, const Hierarchy& hierarchy);

// Whether ranks pass on sums that are not complete yet. Partial sums of 16-bit floats must be kept as float32.
bool passes_on_sums(const Operation& operation);

}  // namespace shoal
