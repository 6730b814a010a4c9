// The collectives in which the ranks of a host read each other's buffers.

#include <algorithm>
#include <cstring>
#include <utility>

#include "algorithms/direct.h"
#include "algorithms/hierarchical.h"
#include "algorithms/host.h"

namespace shoal {

namespace {

// Several tensors are in one buffer, each contiguous, so a rank's parts of them are not adjacent. A rank writes only
// into its own buffer, and there only parts that no peer reads: its own parts in a reduce-scatter, the parts of the
// others in an all-gather.
std::vector<Slice> parts_of(const std::vector<Stripe>& stripes, int index) {
  std::vector<Slice> parts;
  for (const Stripe& stripe : stripes) {
    parts.push_back({stripe.offset + static_cast<size_t>(index) * stripe.part_bytes, stripe.part_bytes});
  }
  return parts;
}

void reduce_scatter_stripes(const Operation& op, Host& host) {
  std::vector<Slice> shown;
  for (int step = 1; step < host.board.size(); ++step) {
    const int peer = (host.board.index() + step) % host.board.size();
    for (const Slice& part : parts_of(*op.stripes, peer)) shown.push_back(part);
  }
  Direct direct(op, host, op.bytes, 0, std::move(shown));
  direct.open();
  for (const Slice& own : parts_of(*op.stripes, host.board.index())) {
    direct.fold(own.offset, own.bytes, static_cast<std::byte*>(op.output) + own.offset);
  }
  direct.pass();
}

void all_gather_stripes(const Operation& op, Host& host) {
  Direct direct(op, host, op.bytes, 0, parts_of(*op.stripes, host.board.index()));
  direct.open();
  for (int step = 1; step < host.board.size(); ++step) {
    const int peer = (host.board.index() + step) % host.board.size();
    for (const Slice& part : parts_of(*op.stripes, peer)) {
      direct.take_input(peer, part.offset, part.bytes, static_cast<std::byte*>(op.output) + part.offset);
    }
  }
  direct.pass();
}

void gather(const Operation& op, Host& host) {
  Direct direct(op, host, op.bytes, 0);
  direct.open();
  for (int peer = 0; peer < host.board.size() && host.board.index() == op.root; ++peer) {
    direct.take_input(peer, 0, op.bytes, direct.output() + static_cast<size_t>(peer) * op.bytes);
  }
  direct.pass();
}

void scatter(const Operation& op, Host& host) {
  const bool is_root = host.board.index() == op.root;
  Direct direct(op, host, is_root ? op.bytes * static_cast<size_t>(host.board.size()) : 0, 0);
  direct.open();
  direct.take_input(op.root, static_cast<size_t>(host.board.index()) * op.bytes, op.bytes, direct.output());
  direct.pass();
}

void broadcast(const Operation& op, Host& host) {
  const bool is_root = host.board.index() == op.root;
  Direct direct(op, host, is_root ? op.bytes : 0, 0);
  direct.open();
  if (!is_root) direct.take_input(op.root, 0, op.bytes, direct.output());
  direct.pass();
}

// A rank writes the offset of its data for each peer into its slot before it shows its buffer.
void all_to_all(const Operation& op, Host& host) {
  Board& board = host.board;
  const int size = board.size();
  board.prepare(host.patience, host.alarm, op.deadline);
  auto* offsets = reinterpret_cast<uint64_t*>(board.own_slot());
  size_t total = 0;
  for (int peer = 0; peer < size; ++peer) {
    offsets[peer] = total;
    total += op.send_bytes[static_cast<size_t>(peer)];
  }
  offsets[size] = total;
  const auto self = static_cast<size_t>(board.index());
  Direct direct(op, host, total, 0, all_but({offsets[self], op.send_bytes[self]}, total));
  direct.open();
  size_t taken = 0;
  for (int peer = 0; peer < size; ++peer) {
    const auto* theirs = reinterpret_cast<const uint64_t*>(board.slot(peer)) + board.index();
    const size_t sent = theirs[1] - theirs[0];
    const size_t wanted = op.receive_bytes[static_cast<size_t>(peer)];
    if (sent != wanted) {
      const std::string rank = std::to_string(board.rank_of(peer));
      throw Failure(Code::mismatch, board.rank_of(peer),
                    "rank " + rank + " sends " + std::to_string(sent) + " bytes where this rank expects " +
                        std::to_string(wanted));
    }
    direct.take_input(peer, theirs[0], sent, direct.output() + taken);
    taken += wanted;
  }
  direct.pass();
}

}  // namespace

void run_hierarchical_all_reduce(const Operation& operation, Host& host, int slices,
                                 const std::function<void(std::byte* slice, size_t bytes)>& across) {
  Operation op = operation;
  if (op.reduction == Reduction::average) op.reduction = Reduction::sum;  // divided by all ranks, in `across`
  Direct direct(op, host, op.bytes, op.bytes);
  direct.open();
  const Slice own = slice_of(op.bytes, slices, host.board.index());
  direct.fold(own.offset, own.bytes, direct.output() + own.offset);
  if (host.board.index() < slices) across(direct.output() + own.offset, own.bytes);
  direct.pass();
  direct.take_slices(slices, {0, op.bytes});
  direct.close();
}

void run_direct(const Operation& op, Host& host) {
  switch (op.collective) {
    case Collective::barrier:
      return host.board.pass(host.patience, host.alarm, op.deadline);
    case Collective::all_reduce:
    case Collective::reduce:
      return run_host_all_reduce(op, host);
    case Collective::all_gather:
      return op.stripes ? all_gather_stripes(op, host) : run_host_exchange(op, host);
    case Collective::reduce_scatter:
      return op.stripes ? reduce_scatter_stripes(op, host) : run_host_exchange(op, host);
    case Collective::broadcast:
      return broadcast(op, host);
    case Collective::gather:
      return gather(op, host);
    case Collective::scatter:
      return scatter(op, host);
    case Collective::all_to_all:
      return all_to_all(op, host);
  }
}

}  // namespace shoal
