// All-to-all with a count for every pair, and its special cases gather and scatter: data goes directly from its sender
// to its receiver.
#pragma once

#include <vector>

#include "algorithms/schedule.h"

namespace shoal {

struct Extent {
  size_t offset;  // bytes
  size_t bytes;
};

// sends[p] of the input goes to rank p, receives[p] of the output comes from it; one entry per rank, this one
// included. What p sends to q must be as long as what q receives from p; it may be nothing.
Schedule pairwise_all_to_all(int rank, const std::vector<Extent>& sends, const std::vector<Extent>& receives);

// `bytes` of every rank's input, to the root's output in the order of ranks.
Schedule direct_gather(int rank, int size, int root, size_t bytes);

// The root's input, `bytes` for every rank in their order, to the ranks' outputs.
Schedule direct_scatter(int rank, int size, int root, size_t bytes);

}  // namespace shoal
