// Binomial trees: broadcast and reduce in ceil(log2 n) steps, for what is small or goes to many ranks.
#pragma once

#include "algorithms/schedule.h"

namespace shoal {

// In the output of every rank; the root's holds the data.
Schedule tree_broadcast(int rank, int size, int root, size_t bytes, size_t element, size_t chunk);

// From every rank's input to the root's output. Scratch: at most four chunks, on inner ranks.
Schedule tree_reduce(int rank, int size, int root, size_t bytes, size_t element, size_t chunk);

}  // namespace shoal
