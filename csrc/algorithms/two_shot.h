// Pairwise exchanges in which every rank talks to every rank directly: two steps for an all-reduce, one for each half.
#pragma once

#include "algorithms/schedule.h"

namespace shoal {

// In place in the output. Scratch: two chunks per rank, or a slice per rank if it is smaller.
Schedule two_shot_all_reduce(int rank, int size, size_t bytes, size_t element, size_t chunk);

// `bytes` per rank; the output holds size * bytes.
Schedule direct_all_gather(int rank, int size, size_t bytes);

// The input holds size * bytes, the output `bytes`. Scratch as above.
Schedule direct_reduce_scatter(int rank, int size, size_t bytes, size_t element, size_t chunk);

}  // namespace shoal
