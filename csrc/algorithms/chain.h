// Chains: broadcast and reduce at the speed of one link whatever the number of ranks, for what is large.
#pragma once

#include "algorithms/schedule.h"

namespace shoal {

// In the output of every rank; the root's holds the data.
Schedule chain_broadcast(int rank, int size, int root, size_t bytes, size_t element, size_t chunk);

// From every rank's input to the root's output. Scratch: at most four chunks, on inner ranks.
Schedule chain_reduce(int rank, int size, int root, size_t bytes, size_t element, size_t chunk);

}  // namespace shoal
