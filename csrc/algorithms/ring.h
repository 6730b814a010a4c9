// Ring algorithms: every rank sends to the next rank only, and receives from the previous one only.
//
// Patarasuk, Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations (2009).
#pragma once

#include "algorithms/schedule.h"

namespace shoal {

// In place in the output. `chunk`: the most bytes of one step.
Schedule ring_all_reduce(int rank, int size, size_t bytes, size_t element, size_t chunk);

// `bytes` per rank; the output holds size * bytes.
Schedule ring_all_gather(int rank, int size, size_t bytes, size_t element, size_t chunk);

// The input holds size * bytes, the output `bytes`. Scratch: about ten chunks, or two parts if they are
// smaller.
Schedule ring_reduce_scatter(int rank, int size, size_t bytes, size_t element, size_t chunk);

}  // namespace shoal
