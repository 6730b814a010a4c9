#include <algorithm>
#include <cstring>

#include "algorithms/hierarchical.h"
#include "algorithms/host.h"
#include "common/reduce.h"

namespace shoal {

namespace {

constexpr size_t kPiece = 128 * 1024;  // what is read from a peer at once: it stays in the core's second cache
constexpr size_t kLine = 64;

// A copy of private memory that peers can reach, for systems that forbid reading each other's memory.
class Bounce {
 public:
  Bounce(Host& host, const void* data, size_t bytes) : buffers_(host.shared_buffers) {
    SharedBuffers::Place place;
    if (bytes == 0 || host.can_read_peers || buffers_.find(data, bytes, place)) return;
    copy_ = buffers_.allocate(bytes);
  }
  ~Bounce() {
    if (copy_ != nullptr) buffers_.release(copy_);
  }
  Bounce(const Bounce&) = delete;
  void* copy() const { return copy_; }

 private:
  SharedBuffers& buffers_;
  void* copy_ = nullptr;
};

struct Slice {
  size_t offset, bytes;
};

// The index-th of `parts` slices of a buffer, cut at cache lines; from `parts` on they are empty.
Slice slice_of(size_t bytes, int parts, int index) {
  if (index >= parts) return {bytes, 0};
  const size_t lines = (bytes + kLine - 1) / kLine;
  const auto bound = [&](int at) { return std::min(bytes, lines * static_cast<size_t>(at) / static_cast<size_t>(parts) * kLine); };
  return {bound(index), bound(index + 1) - bound(index)};
}

// One direct operation of this rank: its buffers as the peers reach them, and the peers' as it does.
class Direct {
 public:
  Direct(const Operation& op, Host& host, size_t input_bytes, size_t output_bytes)
      : op_(op),
        host_(host),
        board_(host.board),
        input_bytes_(input_bytes),
        output_bytes_(output_bytes),
        in_place_(op.input == op.output),
        input_bounce_(host, op.input, in_place_ ? std::max(input_bytes, output_bytes) : input_bytes),
        output_bounce_(host, op.output, in_place_ ? 0 : output_bytes) {
    input_ = op.input;
    output_ = op.output;
    if (void* copy = input_bounce_.copy()) {
      std::memcpy(copy, op.input, input_bytes);
      input_ = copy;
      if (in_place_) output_ = copy;
    }
    if (void* copy = output_bounce_.copy()) output_ = copy;
  }

  // Shows this rank's buffers, and waits for everybody's.
  void open() {
    board_.prepare(host_.patience, host_.alarm, op_.deadline);
    Notice& notice = board_.own_notice();
    notice.input = describe(input_, input_bytes_, host_.shared_buffers);
    notice.output = describe(output_, output_bytes_, host_.shared_buffers);
    notice.released = host_.shared_buffers.released();
    board_.publish();
    board_.await_all(host_.patience, host_.alarm, op_.deadline);
    for (int index = 0; index < board_.size(); ++index) {
      notices_.push_back(board_.notice(index));  // the board's own are written again two ticks on
      if (index != board_.index()) host_.peer_buffers.refresh(board_.pid_of(index), notices_.back().released);
    }
    for (int index = 0; index < board_.size(); ++index) {
      inputs_.emplace_back(board_, host_.peer_buffers, index, notices_[static_cast<size_t>(index)].input);
      outputs_.emplace_back(board_, host_.peer_buffers, index, notices_[static_cast<size_t>(index)].output);
    }
  }

  // Waits until everybody has read what it needs, and gives a result that was written elsewhere to the caller.
  void close() {
    pass();
    if (output_ != op_.output) std::memcpy(op_.output, output_, output_bytes_);
  }

  void pass() { board_.pass(host_.patience, host_.alarm, op_.deadline); }

  // Folds everybody's input from `offset` into `out`, and into the same place of everybody else's output if those
  // are `pushed` to.
  void fold(size_t offset, size_t bytes, std::byte* out, bool pushed) {
    const size_t element = size_of(op_.dtype);
    const int size = board_.size();
    std::vector<std::byte>& scratch = host_.scratch;
    scratch.resize(kPiece * static_cast<size_t>(size));
    std::vector<const void*> sources(static_cast<size_t>(size));
    for (size_t done = 0; done < bytes; done += kPiece) {
      const size_t piece = std::min(kPiece, bytes - done);
      for (int index = 0; index < size; ++index) {
        const auto at = static_cast<size_t>(index);
        sources[at] = inputs_[at].read(offset + done, piece, scratch.data() + at * kPiece);
      }
      combine(op_.dtype, op_.reduction, out + done, sources.data(), size, piece / element, size);
      if (pushed) push(offset + done, piece, out + done);
      host_.alarm.check();
    }
  }

  void push(size_t offset, size_t bytes, const std::byte* data) {
    for (int step = 1; step < board_.size(); ++step) {
      const auto peer = static_cast<size_t>((board_.index() + step) % board_.size());
      copy_streaming(outputs_[peer].mapped() + offset, data, bytes);
    }
  }

  // Takes bytes of a peer's buffer, in pieces so that an alarm is heard.
  void take(const PeerMemory& from, size_t offset, size_t bytes, std::byte* out) {
    constexpr size_t most = 4 << 20;
    for (size_t done = 0; done < bytes; done += most) {
      from.copy(offset + done, std::min(most, bytes - done), out + done);
      host_.alarm.check();
    }
  }

  // Takes the slices of the result from the ranks that folded them.
  void take_slices(int slices) {
    for (int step = 1; step < board_.size(); ++step) {
      const int peer = (board_.index() + step) % board_.size();
      const Slice slice = slice_of(op_.bytes, slices, peer);
      take(output(peer), slice.offset, slice.bytes, own_output() + slice.offset);
    }
  }

  bool all_outputs_are_mapped() const {
    return std::all_of(outputs_.begin(), outputs_.end(), [](const PeerMemory& memory) { return memory.mapped(); });
  }

  const PeerMemory& input(int index) const { return inputs_[static_cast<size_t>(index)]; }
  const PeerMemory& output(int index) const { return outputs_[static_cast<size_t>(index)]; }
  std::byte* own_output() const { return static_cast<std::byte*>(output_); }
  const std::byte* own_input() const { return static_cast<const std::byte*>(input_); }

 private:
  const Operation& op_;
  Host& host_;
  Board& board_;
  const size_t input_bytes_, output_bytes_;
  const bool in_place_;
  Bounce input_bounce_, output_bounce_;
  const void* input_;
  void* output_;
  std::vector<Notice> notices_;
  std::vector<PeerMemory> inputs_, outputs_;
};

// Two-shot. Where every output is mapped, rank i writes slice i of the result to all outputs itself, which saves
// a tick and a reading; otherwise everyone reads it from rank i. (Writing into a peer's private memory is never
// done: a rank left behind by a group that failed would write into what the peer has there by then.)
void all_reduce(const Operation& op, Host& host) {
  Direct direct(op, host, op.bytes, op.bytes);
  direct.open();
  const int size = host.board.size();
  const Slice own = slice_of(op.bytes, size, host.board.index());
  const bool pushed = direct.all_outputs_are_mapped();
  direct.fold(own.offset, own.bytes, direct.own_output() + own.offset, pushed);
  if (!pushed) {
    direct.pass();
    direct.take_slices(size);
  }
  direct.close();
}

void reduce_scatter(const Operation& op, Host& host) {
  Direct direct(op, host, op.bytes * static_cast<size_t>(host.board.size()), 0);
  direct.open();
  direct.fold(static_cast<size_t>(host.board.index()) * op.bytes, op.bytes, direct.own_output(), false);
  direct.close();
}

// Every rank folds a slice into memory that the others can read; the root takes the slices.
void reduce(const Operation& op, Host& host) {
  const int size = host.board.size();
  const Slice own = slice_of(op.bytes, size, host.board.index());
  std::vector<std::byte> folded(own.bytes);
  Operation slice = op;
  slice.output = folded.data();
  Direct direct(slice, host, op.bytes, own.bytes);
  direct.open();
  direct.fold(own.offset, own.bytes, direct.own_output(), false);
  direct.pass();
  if (host.board.index() == op.root) {
    for (int peer = 0; peer < size; ++peer) {
      const Slice part = slice_of(op.bytes, size, peer);
      direct.take(direct.output(peer), 0, part.bytes, static_cast<std::byte*>(op.output) + part.offset);
    }
  }
  direct.pass();
}

void all_gather(const Operation& op, Host& host) {
  const int size = host.board.size();
  Direct direct(op, host, op.bytes, 0);
  direct.open();
  auto* out = static_cast<std::byte*>(op.output);
  for (int step = 0; step < size; ++step) {
    const int peer = (host.board.index() + step) % size;
    std::byte* to = out + static_cast<size_t>(peer) * op.bytes;
    if (peer == host.board.index()) {
      if (to != op.input) std::memcpy(to, op.input, op.bytes);
    } else {
      direct.take(direct.input(peer), 0, op.bytes, to);
    }
  }
  direct.pass();
}

// From the root alone (broadcast, scatter), or to the root alone (gather).
void rooted(const Operation& op, Host& host) {
  const bool is_root = host.board.index() == op.root;
  const auto size = static_cast<size_t>(host.board.size());
  const auto own = static_cast<size_t>(host.board.index());
  auto* out = static_cast<std::byte*>(op.output);
  const bool from_root = op.collective != Collective::gather;
  const size_t shown = !from_root ? op.bytes : !is_root ? 0 : op.collective == Collective::scatter ? size * op.bytes : op.bytes;
  Direct direct(op, host, shown, 0);
  direct.open();
  if (op.collective == Collective::broadcast && !is_root) {
    direct.take(direct.input(op.root), 0, op.bytes, out);
  } else if (op.collective == Collective::scatter) {
    direct.take(direct.input(op.root), own * op.bytes, op.bytes, out);
  } else if (op.collective == Collective::gather && is_root) {
    for (size_t peer = 0; peer < size; ++peer) {
      direct.take(direct.input(static_cast<int>(peer)), 0, op.bytes, out + peer * op.bytes);
    }
  }
  direct.pass();
}

// Where a rank's data for each peer begins is written into its slot, before its buffer.
void all_to_all(const Operation& op, Host& host) {
  Board& board = host.board;
  const int size = board.size();
  size_t total = 0;
  board.prepare(host.patience, host.alarm, op.deadline);
  auto* offsets = reinterpret_cast<uint64_t*>(board.own_slot());
  for (int peer = 0; peer < size; ++peer) {
    offsets[peer] = total;
    total += op.send_bytes[static_cast<size_t>(peer)];
  }
  offsets[size] = total;
  Direct direct(op, host, total, 0);
  direct.open();
  std::vector<Slice> slices;
  for (int peer = 0; peer < size; ++peer) {
    const auto* theirs = reinterpret_cast<const uint64_t*>(board.slot(peer));
    slices.push_back({theirs[board.index()], theirs[board.index() + 1] - theirs[board.index()]});
  }
  auto* out = static_cast<std::byte*>(op.output);
  std::string wrong;
  for (int peer = 0; peer < size; ++peer) {
    const Slice& slice = slices[static_cast<size_t>(peer)];
    const size_t wanted = op.receive_bytes[static_cast<size_t>(peer)];
    if (slice.bytes != wanted) {
      throw Failure(Code::mismatch, board.rank_of(peer),
                    "rank " + std::to_string(board.rank_of(peer)) + " sends " + std::to_string(slice.bytes) +
                        " bytes where this rank expects " + std::to_string(wanted));
    }
    direct.take(direct.input(peer), slice.offset, slice.bytes, out);
    out += wanted;
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
  direct.fold(own.offset, own.bytes, direct.own_output() + own.offset, false);
  if (host.board.index() < slices) across(direct.own_output() + own.offset, own.bytes);
  direct.pass();
  direct.take_slices(slices);
  direct.close();
}

void run_direct(const Operation& op, Host& host) {
  switch (op.collective) {
    case Collective::barrier:
      return host.board.pass(host.patience, host.alarm, op.deadline);
    case Collective::all_reduce:
      return all_reduce(op, host);
    case Collective::reduce_scatter:
      return reduce_scatter(op, host);
    case Collective::all_gather:
      return all_gather(op, host);
    case Collective::reduce:
      return reduce(op, host);
    case Collective::all_to_all:
      return all_to_all(op, host);
    default:
      return rooted(op, host);
  }
}

}  // namespace shoal
