// One collective, as a rank calls it. The numbers are part of the C interface.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "common/call.h"
#include "common/deadline.h"
#include "common/types.h"

namespace shoal {

enum class Algorithm : int {
  one_shot = 0,          // every rank writes once, and reads the data of all ranks
  direct = 1,            // ranks read each other's buffers; for an all-reduce it is called two-shot
  ring = 2,
  halving_doubling = 3,  // for all-gather and reduce-scatter it is called recursive
  double_tree = 4,
  hierarchical = 5,      // within the hosts, then across, then within again
  tree = 6,
  chain = 7,
  pairwise = 8,
  in_network = 9,        // by an aggregator between the hosts
};

// Equal parts, one for each rank, one after another in a buffer.
struct Stripe {
  size_t offset;      // of the first rank's part
  size_t part_bytes;  // of each part
};

struct Operation {
  Collective collective = Collective::barrier;
  Algorithm algorithm = Algorithm::one_shot;
  Dtype dtype = Dtype::uint8;
  Reduction reduction = Reduction::sum;
  int root = 0;
  const void* input = nullptr;
  void* output = nullptr;
  // all_reduce, broadcast, reduce: of the whole buffer; all_gather, reduce_scatter, gather, scatter: of one rank's
  // part.
  size_t bytes = 0;
  // all_to_all: what goes to (comes from) each rank, in the order of ranks, without gaps.
  std::vector<size_t> send_bytes, receive_bytes;
  // all_gather, reduce_scatter within a host, in place, direct: several tensors in one buffer of `bytes`, each cut
  // into a part for every rank; in the order of their offsets, and none overlaps the next. Absent: one tensor.
  std::optional<std::vector<Stripe>> stripes;
  Deadline deadline = Deadline::after(1800);
};

// What all ranks of a host must agree on. The sizes of an all-to-all differ from rank to rank.
Call call_of(const Operation& operation);

// Throws Failure(Code::invalid) if no algorithm can do the operation among `size` ranks, on one host or on several. All
// ranks get the same result, before any of them sends anything.
void require_possible(const Operation& operation, int size, bool one_host);

}  // namespace shoal
