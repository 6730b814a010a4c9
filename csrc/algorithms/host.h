// The ranks of a group on one host, and the collectives among them through memory.
//
// An operation here is over the ranks of the host alone: `root` and the order of parts are local indices.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "algorithms/operation.h"
#include "transport/board.h"
#include "transport/huge_pages.h"
#include "transport/peer_memory.h"

namespace shoal {

struct Host {
  Board& board;
  PeerBuffers& peer_buffers;
  SharedBuffers& shared_buffers;
  HugePages& huge_pages;
  const Alarm& alarm;
  Patience patience;
  bool can_read_peers;  // process_vm_readv works between all ranks of the host
  std::vector<std::byte> scratch = {};  // kept from one operation to the next
};

// One-shot: every rank copies what others need into its slot and publishes; when all have, every rank takes
// what it needs out of the slots. One tick, S bytes written and (n - 1) S read per rank of an all-reduce.
// In two halves, so that a caller can look whether the second would have to wait.
bool fits_one_shot(const Operation& operation, int size);
void begin_one_shot(const Operation& operation, Host& host);
void finish_one_shot(const Operation& operation, Host& host);

// Direct: ranks publish where their buffers are, and read from each other's what they need; a second tick
// says that they have, so that the buffers may be used again. All-reduce, "two-shot": rank i folds the i-th
// slice of all, then everyone takes the slices of the others: (n - 1)/n S read twice, nothing copied
// besides.
void run_direct(const Operation& operation, Host& host);

}  // namespace shoal
