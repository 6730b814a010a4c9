// Double binary tree all-reduce: as few steps as a tree, and no rank sends more than twice the buffer.
//
// Sanders, Speck, Träff: Two-tree algorithms for full bandwidth broadcast, reduction and scan (2009).
#pragma once

#include "algorithms/schedule.h"

namespace shoal {

// In place in the output. `chunk`: the most bytes of one step.
Schedule double_tree_all_reduce(int rank, int size, size_t bytes, size_t element, size_t chunk);

}  // namespace shoal
