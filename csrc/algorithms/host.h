// The ranks of a group on one host, and the collectives among them through memory.
//
// An operation here is over the ranks of the host alone: `root` and the order of parts are local indices.
#pragma once

#include <algorithm>
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
  size_t cache_share = 16 << 20;  // bytes of last-level cache for each rank, equal on all ranks
  size_t most_block_bytes = 512 * 1024;  // of a block that goes through the slots; equal on all ranks
  std::vector<std::byte> scratch = {};  // kept from one operation to the next
};

// Bytes of a block: two slots of each rank, and the data that it reads and writes in between, should stay in the
// caches.
inline size_t block_bytes(const Host& host) {
  constexpr size_t least = 64 * 1024;
  return std::min({std::max(host.cache_share / 8, least), host.most_block_bytes, Board::slot_bytes});
}

// One-shot: every rank copies what others need into its slot and publishes; when all have, every rank takes what it
// needs out of the slots. One tick, S bytes written and (n - 1) S read per rank of an all-reduce. In two halves, so
// that a caller can see whether the second half would have to wait.
constexpr size_t one_shot_bytes = 256 * 1024;  // of a slot
bool fits_one_shot(const Operation& operation, int size);
void begin_one_shot(const Operation& operation, Host& host);
void finish_one_shot(const Operation& operation, Host& host);

// Direct: ranks publish where their buffers are, and read from each other's what they need; a second tick says that the
// reads are done, so that the buffers may be used again.
void run_direct(const Operation& operation, Host& host);

// "Two-shot", and reduce: rank i folds slice i of all ranks, and gives the sum to all ranks, or to the root.
void run_host_all_reduce(const Operation& operation, Host& host);

// All-gather and reduce-scatter of one tensor.
void run_host_exchange(const Operation& operation, Host& host);

}  // namespace shoal
