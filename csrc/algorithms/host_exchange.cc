// All-gather and reduce-scatter within a host for buffers that are too large for one-shot: every rank has a part for
// every other rank.
//
// A private buffer goes through slots, block by block, as in the all-reduce (host_all_reduce.cc says why). Two ranks i
// and j exchange data through two places, place j of slot i and place i of slot j. In even ticks each rank works in its
// own slot, in odd ticks in the other rank's, so both places change hands every tick: piece by piece, a rank takes the
// data that it finds and puts its own data in the same place.
//
//                place j of slot i            place i of slot j
//   tick 0       i puts block 0               j puts block 0
//   tick 1       j takes it, puts block 1     i takes it, puts block 1
//   tick 2       i takes it                   j takes it
//
// The number of blocks is even. So a rank takes the last block out of its own slot, which no other rank uses then: it
// may leave and begin the next operation, and the lines of the slot are in the cache where they are needed first.
//
// A buffer that peers have mapped is not put anywhere: they take from it, and a last tick says that they have. If all
// buffers are mapped, one block is the whole buffer.

#include <algorithm>
#include <cstring>
#include <vector>

#include "algorithms/direct.h"
#include "algorithms/host.h"
#include "algorithms/slice.h"
#include "common/reduce.h"

namespace shoal {

namespace {

// Parts of this size or more leave the caches before they are used.
constexpr size_t worth_streaming = 4 * 1024 * 1024;

// Bytes to copy at once, from one peer after another, when nothing goes through slots; the alarm is checked in between.
constexpr size_t whole_copy_bytes = 16 * 1024 * 1024;

class Exchange {
 public:
  Exchange(const Operation& operation, Host& host)
      : op_(operation),
        host_(host),
        board_(host.board),
        gathers_(operation.collective == Collective::all_gather),
        input_(static_cast<const std::byte*>(operation.input)),
        input_bytes_(gathers_ ? operation.bytes : operation.bytes * static_cast<size_t>(host.board.size())),
        output_(static_cast<std::byte*>(operation.output)),
        output_bytes_(gathers_ ? operation.bytes * static_cast<size_t>(host.board.size()) : operation.bytes),
        piece_bytes_(piece_bytes(host.board.size())),
        mapped_(static_cast<size_t>(host.board.size())),
        sources_(mapped_.size()) {
    const auto others = std::max<size_t>(mapped_.size() - 1, 1);
    most_bytes_ = std::max(block_bytes(host) / others / line_bytes * line_bytes, line_bytes);
    blocks_ = std::max<size_t>(rounded_up(op_.bytes, most_bytes_) / most_bytes_, 1);
    blocks_ += blocks_ % 2;
    block_bytes_ = rounded_up(rounded_up(op_.bytes, blocks_) / blocks_, line_bytes);
  }

  void run() {
    host_.huge_pages.make_room(output_, output_bytes_);
    const bool some_are_mapped = show();
    for (size_t tick = 1; tick <= blocks_; ++tick) {
      move(tick);
      if (tick < blocks_ || some_are_mapped) finish_tick();
    }
  }

 private:
  // True if peers read directly from the buffer of any rank; all ranks get the same result.
  bool show() {
    board_.prepare(host_.patience, host_.alarm, op_.deadline);
    first_tick_ = board_.next_tick();
    Notice& notice = board_.own_notice();
    notice.input = describe(input_, input_bytes_, host_.shared_buffers);
    notice.output = {};
    notice.released = host_.shared_buffers.released();
    is_mapped_ = notice.input.descriptor >= 0;
    move(0);
    finish_tick();
    bool some_are_mapped = is_mapped_, all_are_mapped = is_mapped_;
    for (int index = 0; index < board_.size(); ++index) {
      if (index == board_.index()) continue;
      const Notice& theirs = board_.notice(index);
      host_.peer_buffers.refresh(board_.pid_of(index), theirs.released);
      const bool is_mapped = theirs.input.descriptor >= 0;
      some_are_mapped |= is_mapped;
      all_are_mapped &= is_mapped;
      if (!is_mapped) continue;
      mapped_[static_cast<size_t>(index)] =
          host_.peer_buffers.map(board_.pid_of(index), board_.rank_of(index), theirs.input);
    }
    if (all_are_mapped) {
      blocks_ = 1;
      block_bytes_ = op_.bytes;
      if (gathers_) piece_bytes_ = whole_copy_bytes;
    }
    return some_are_mapped;
  }

  void finish_tick() {
    board_.publish();
    board_.await_all(host_.patience, host_.alarm, op_.deadline);
    host_.alarm.check();
  }

  // Of a part.
  Slice block(size_t index) const {
    const size_t begin = std::min(op_.bytes, index * block_bytes_);
    return {begin, std::min(block_bytes_, op_.bytes - begin)};
  }

  // Where this rank takes and puts in a tick what it shares with a peer.
  std::byte* place(int peer, size_t tick) const {
    const int owner = tick % 2 == 0 ? board_.index() : peer, other = tick % 2 == 0 ? peer : board_.index();
    const int number = (other - owner + board_.size()) % board_.size() - 1;
    return board_.slot_of(owner, first_tick_) + static_cast<size_t>(number) * most_bytes_;
  }

  // Takes block `tick` - 1 from the others, and puts block `tick` of this rank, if there are such blocks.
  void move(size_t tick) {
    const Slice taken = tick > 0 ? block(tick - 1) : Slice{0, 0};
    const Slice given = tick < blocks_ ? block(tick) : Slice{0, 0};
    for (size_t at = 0; at < std::max(taken.bytes, given.bytes); at += piece_bytes_) {
      const Slice take{taken.offset + at, at < taken.bytes ? std::min(piece_bytes_, taken.bytes - at) : 0};
      const Slice give{given.offset + at, at < given.bytes ? std::min(piece_bytes_, given.bytes - at) : 0};
      if (!gathers_ && take.bytes > 0) fold(take, at, tick);
      for (int step = 1; step < board_.size(); ++step) {
        const int peer = (board_.index() + step) % board_.size();
        if (gathers_ && take.bytes > 0) take_part(peer, take, at, tick);
        if (!is_mapped_ && give.bytes > 0) std::memcpy(place(peer, tick) + at, given_to(peer) + give.offset, give.bytes);
      }
      const Slice own = is_mapped_ ? take : give;  // the bytes that are put into the slot are in the caches
      if (gathers_ && own.bytes > 0) copy(part(output_, board_.index()) + own.offset, input_ + own.offset, own.bytes);
      host_.alarm.check();
    }
  }

  template <class Byte>
  Byte* part(Byte* whole, int index) const {
    return whole + static_cast<size_t>(index) * op_.bytes;
  }

  const std::byte* given_to(int peer) const { return gathers_ ? input_ : part(input_, peer); }

  // The peer's data for this rank, for the piece at `at` in its place.
  const std::byte* given_by(int peer, const Slice& piece, size_t at, size_t tick) const {
    const std::byte* const mapped = mapped_[static_cast<size_t>(peer)];
    if (mapped == nullptr) return place(peer, tick) + at;
    return (gathers_ ? mapped : part(mapped, board_.index())) + piece.offset;
  }

  void take_part(int peer, const Slice& piece, size_t at, size_t tick) {
    copy(part(output_, peer) + piece.offset, given_by(peer, piece, at, tick), piece.bytes);
  }

  void copy(std::byte* to, const std::byte* from, size_t bytes) const {
    if (to == from) return;
    if (op_.bytes >= worth_streaming) {
      copy_streaming(to, from, bytes);
    } else {
      std::memcpy(to, from, bytes);
    }
  }

  void fold(const Slice& piece, size_t at, size_t tick) {
    for (int index = 0; index < board_.size(); ++index) {
      sources_[static_cast<size_t>(index)] = index == board_.index() ? part(input_, index) + piece.offset
                                                                     : given_by(index, piece, at, tick);
    }
    combine(op_.dtype, op_.reduction, output_ + piece.offset, sources_.data(), board_.size(),
            piece.bytes / size_of(op_.dtype), board_.size());
  }

  const Operation& op_;
  Host& host_;
  Board& board_;
  const bool gathers_;
  const std::byte* const input_;
  const size_t input_bytes_;
  std::byte* const output_;
  const size_t output_bytes_;
  size_t piece_bytes_;
  size_t most_bytes_;   // of a place
  size_t blocks_, block_bytes_;
  uint32_t first_tick_ = 0;
  bool is_mapped_ = false;  // this rank's input, by the peers
  std::vector<const std::byte*> mapped_;  // the peers' inputs, by this rank; null: they put theirs
  std::vector<const void*> sources_;
};

}  // namespace

void run_host_exchange(const Operation& operation, Host& host) { Exchange(operation, host).run(); }

}  // namespace shoal
