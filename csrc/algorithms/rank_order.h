// The fold of every rank's part of a region, in the order of ranks and in one pass.
#pragma once

#include <vector>

#include "algorithms/schedule.h"

namespace shoal {

// Adds steps that receive every other rank's part of `own` into scratch, and fold all parts, in the order of
// ranks, into the region at `result` (which may be `own`). `sends`, per chunk, are steps that must be
// complete before the result of that chunk is written. Returns, per chunk, the step that makes the result.
//
// 16-bit floats are added in 32 bits and rounded once. The result of an element depends only on the ranks' elements:
// not on the size of the buffer, or on where it is cut. Scratch: two chunks per rank.
std::vector<int> add_rank_order_fold(Schedule& schedule, int rank, int size, Region own, Place result,
                                     const std::vector<std::vector<int>>& sends, size_t chunk);

}  // namespace shoal
