// The all-reduce within a host for buffers that are too large for one-shot, and the reduce, where only the root takes
// the sums.
//
// The buffer is cut into blocks, and a block into a slice for each rank: rank i folds slice i of all ranks, in the
// order of ranks. A private buffer goes through the rank's slots, block by block; all shared data stays in the caches,
// and each byte of a buffer is read from memory once and written once. The size of its pages does not matter, nor
// whether peers may read it. There are two slots, for even and for odd ticks, so that a tick moves three blocks on. In
// tick t a rank
//
//   takes the sums of block t - 2 out of its slot, piece by piece, and puts its own of block t where each piece was;
//   folds the slices of block t - 1 of all ranks in place, in the slots, and writes the sum back to all these places.
//
//                tick 0       tick 1         tick 2           tick 3            tick 4
//   block 0      put          fold           take
//   block 1                   put            fold             take
//   block 2                                  put              fold              take
//
// So the places of a slice alternate between their owner and the rank that folds them, and each of the two reads a line
// before it writes it. This makes it fast: a core that reads a line which another core changed gets the line for
// itself, and its later writes stay in its own cache. To write first to a line that another core has read takes five
// times as long between cores with a common cache, and twenty times between others. So no rank keeps its sums in a
// place of its own, from which the others copy, though that would need fewer writes.
//
// A buffer that peers have mapped needs no slot: they read its slices and write the sums there. If all buffers are
// mapped, one block is the whole buffer. (No rank ever writes into a peer's private memory: a rank that still runs
// after its group failed would overwrite what the peer has there by then. A slot belongs to the group, and nothing
// reads it after a failure.)

#include <algorithm>
#include <cstring>
#include <vector>

#include "algorithms/direct.h"
#include "algorithms/host.h"
#include "algorithms/slice.h"
#include "common/reduce.h"

namespace shoal {

namespace {

// How a buffer is cut into blocks of nearly the same size, and a block into slices.
class Cut {
 public:
  Cut(size_t bytes, size_t most, int ranks) : bytes_(bytes), ranks_(static_cast<size_t>(ranks)) {
    const size_t unit = line_bytes * ranks_;
    const size_t largest = std::max(most / unit * unit, unit);
    blocks_ = std::max<size_t>(rounded_up(bytes, largest) / largest, 1);
    block_bytes_ = rounded_up(rounded_up(bytes, blocks_) / blocks_, unit);
  }

  size_t blocks() const { return blocks_; }
  size_t most_of_slice() const { return block_bytes_ / ranks_; }

  // Of the whole buffer. Ranks at the end may have an empty one.
  Slice slice(size_t block, int rank) const {
    const size_t begin = std::min(bytes_, block * block_bytes_);
    const size_t of_block = std::min(block_bytes_, bytes_ - begin);
    const size_t lines = (of_block + line_bytes - 1) / line_bytes;
    const auto cut = [&](size_t part) { return begin + std::min(of_block, lines * part / ranks_ * line_bytes); };
    const size_t from = cut(static_cast<size_t>(rank));
    return {from, cut(static_cast<size_t>(rank) + 1) - from};
  }

 private:
  size_t bytes_, ranks_, blocks_, block_bytes_;
};

class AllReduce {
 public:
  AllReduce(const Operation& operation, Host& host)
      : op_(operation),
        host_(host),
        board_(host.board),
        input_(static_cast<const std::byte*>(operation.input)),
        output_(static_cast<std::byte*>(operation.output)),
        cut_(operation.bytes, block_bytes(host), host.board.size()),
        piece_bytes_(piece_bytes(host.board.size())),
        only_taker_(operation.collective == Collective::reduce ? operation.root : -1),
        peers_(static_cast<size_t>(host.board.size())),
        sources_(peers_.size()) {}

  void run() {
    show();
    for (size_t tick = 1; tick <= cut_.blocks(); ++tick) {
      if (!is_mapped_) exchange(tick);
      fold(tick - 1);
      finish_tick();
    }
    if (!is_mapped_) exchange(cut_.blocks() + 1);
  }

 private:
  // Where a peer's buffer is mapped here; null where it goes through the peer's slots.
  struct Peer {
    const std::byte* input = nullptr;
    std::byte* output = nullptr;
  };

  void show() {
    board_.prepare(host_.patience, host_.alarm, op_.deadline);
    Notice& notice = board_.own_notice();
    notice.input = describe(input_, op_.bytes, host_.shared_buffers);
    notice.output = takes(board_.index()) ? describe(output_, op_.bytes, host_.shared_buffers) : notice.input;
    notice.released = host_.shared_buffers.released();
    is_mapped_ = is_mapped(notice);
    if (!is_mapped_) exchange(0);
    finish_tick();
    bool all_are_mapped = true;
    for (int index = 0; index < board_.size(); ++index) {
      const Notice& theirs = board_.notice(index);
      all_are_mapped &= is_mapped(theirs);
      if (index == board_.index()) continue;
      host_.peer_buffers.refresh(board_.pid_of(index), theirs.released);
      if (is_mapped(theirs)) peers_[static_cast<size_t>(index)] = {map(index, theirs.input), map(index, theirs.output)};
    }
    if (all_are_mapped) cut_ = Cut(op_.bytes, rounded_up(op_.bytes, line_bytes * peers_.size()), board_.size());
  }

  // All ranks that read a notice get the same result.
  static bool is_mapped(const Notice& notice) { return notice.input.descriptor >= 0 && notice.output.descriptor >= 0; }

  std::byte* map(int index, const Location& region) {
    return host_.peer_buffers.map(board_.pid_of(index), board_.rank_of(index), region);
  }

  // Whether a rank gets the sums.
  bool takes(int index) const { return only_taker_ < 0 || index == only_taker_; }

  void finish_tick() {
    board_.publish();
    board_.await_all(host_.patience, host_.alarm, op_.deadline);
    host_.alarm.check();
  }

  // Takes the sums of block `tick` - 2 out of this rank's slot, and puts block `tick` there, if there are such blocks.
  void exchange(size_t tick) {
    for (int step = 1; step < board_.size(); ++step) {
      const int peer = (board_.index() + step) % board_.size();
      std::byte* const place = board_.own_slot() + static_cast<size_t>(peer) * cut_.most_of_slice();
      const Slice sums = tick >= 2 && takes(board_.index()) ? cut_.slice(tick - 2, peer) : Slice{0, 0};
      const Slice given = tick < cut_.blocks() ? cut_.slice(tick, peer) : Slice{0, 0};
      for (size_t at = 0; at < std::max(sums.bytes, given.bytes); at += piece_bytes_) {
        if (at < sums.bytes) {
          std::memcpy(output_ + sums.offset + at, place + at, std::min(piece_bytes_, sums.bytes - at));
        }
        if (at < given.bytes) {
          std::memcpy(place + at, input_ + given.offset + at, std::min(piece_bytes_, given.bytes - at));
        }
      }
    }
  }

  // Where the peer's bytes of this rank's slice are, and where their sum belongs.
  std::byte* place_of(int peer) const {
    return board_.slot_of(peer, board_.next_tick() - 1) + static_cast<size_t>(board_.index()) * cut_.most_of_slice();
  }

  void fold(size_t block) {
    const Slice own = cut_.slice(block, board_.index());
    for (size_t at = 0; at < own.bytes; at += piece_bytes_) {
      const size_t bytes = std::min(piece_bytes_, own.bytes - at), offset = own.offset + at;
      for (int index = 0; index < board_.size(); ++index) {
        const std::byte* const input = index == board_.index() ? input_ : peers_[static_cast<size_t>(index)].input;
        sources_[static_cast<size_t>(index)] = input != nullptr ? input + offset : place_of(index) + at;
      }
      const auto target = [&](int index) {
        if (index == board_.index()) return output_ + offset;
        std::byte* const output = peers_[static_cast<size_t>(index)].output;
        return output != nullptr ? output + offset : place_of(index) + at;
      };
      std::byte* const sum = target(takes(board_.index()) ? board_.index() : only_taker_);
      combine(op_.dtype, op_.reduction, sum, sources_.data(), board_.size(), bytes / size_of(op_.dtype), board_.size());
      for (int step = 1; step < board_.size() && only_taker_ < 0; ++step) {
        std::memcpy(target((board_.index() + step) % board_.size()), sum, bytes);
      }
      host_.alarm.check();
    }
  }

  const Operation& op_;
  Host& host_;
  Board& board_;
  const std::byte* const input_;
  std::byte* const output_;
  Cut cut_;
  const size_t piece_bytes_;
  const int only_taker_;  // of the sums; -1: all ranks take them
  bool is_mapped_ = false;  // this rank's buffer, by the peers
  std::vector<Peer> peers_;
  std::vector<const void*> sources_;
};

}  // namespace

void run_host_all_reduce(const Operation& operation, Host& host) { AllReduce(operation, host).run(); }

}  // namespace shoal
