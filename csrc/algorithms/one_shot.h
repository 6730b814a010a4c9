// One-shot all-reduce: every rank sends everything to every rank, and folds for itself. One step.
#pragma once

#include "algorithms/schedule.h"

namespace shoal {

// In place in the output. Scratch: two chunks per rank, or the buffer per rank if it is smaller.
Schedule one_shot_all_reduce(int rank, int size, size_t bytes, size_t element, size_t chunk);

}  // namespace shoal
