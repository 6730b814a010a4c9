#include "algorithms/direct.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <exception>
#include <utility>

#include "algorithms/slice.h"
#include "common/reduce.h"

namespace shoal {

namespace {

// Bytes to read from a peer at once for folding: they stay in the core's second-level cache.
constexpr size_t fold_piece_bytes = 128 * 1024;

// Data of up to this size is copied to memory that the peers have mapped: the copies of all ranks then stay in the
// last-level cache, beside other data. (Measured with a share of 16 MiB: 2 MiB of moved data.)
size_t worth_copying(const Operation& op, const Host& host) {
  return op.collective == Collective::all_reduce ? host.cache_share : host.cache_share / 8;
}

// Bytes to copy at once, so that an alarm is noticed in between.
constexpr size_t take_piece_bytes = 16 * 1024 * 1024;

}  // namespace

Slice slice_of(size_t bytes, int parts, int index) {
  if (index >= parts) return {bytes, 0};
  const auto boundaries = slice_boundaries(bytes, 1, parts);
  const size_t begin = boundaries[static_cast<size_t>(index)];
  return {begin, boundaries[static_cast<size_t>(index) + 1] - begin};
}

std::vector<Slice> all_but(Slice own, size_t bytes) {
  const size_t after = own.offset + own.bytes;
  return {{0, own.offset}, {after, bytes - after}};
}

Bounce::Bounce(Host& host, const void* data, size_t bytes, size_t limit)
    : buffers_(host.shared_buffers), exceptions_(std::uncaught_exceptions()) {
  SharedBuffers::Place place;
  const bool is_read_in_place = host.can_read_peers && bytes > limit;
  if (bytes == 0 || is_read_in_place || buffers_.find(data, bytes, place)) return;
  copy_ = buffers_.allocate(std::bit_ceil(bytes));  // few sizes, so that the next operation can use it again
}

Bounce::~Bounce() {
  if (copy_ == nullptr) return;
  if (std::uncaught_exceptions() > exceptions_) {
    buffers_.discard(copy_);  // the operation failed: a peer may be writing to it still
  } else {
    buffers_.release(copy_);
  }
}

Direct::Direct(const Operation& operation, Host& host, size_t input_bytes, size_t output_bytes,
               std::vector<Slice> shown)
    : operation_(operation),
      host_(host),
      board_(host.board),
      input_bytes_(input_bytes),
      output_bytes_(output_bytes),
      shown_(std::move(shown)),
      in_place_(operation.input == operation.output && output_bytes > 0),
      input_bounce_(host, operation.input, in_place_ ? std::max(input_bytes, output_bytes) : input_bytes,
                    worth_copying(operation, host)),
      output_bounce_(host, operation.output, in_place_ ? 0 : output_bytes, worth_copying(operation, host)),
      input_(operation.input),
      output_(operation.output) {
  if (void* copy = input_bounce_.copy()) {
    copy_shown(copy, operation.input);
    input_ = copy;
    if (in_place_) output_ = copy;
  }
  if (void* copy = output_bounce_.copy()) output_ = copy;
}

void Direct::open() {
  board_.prepare(host_.patience, host_.alarm, operation_.deadline);
  Notice& notice = board_.own_notice();
  notice.input = describe(input_, input_bytes_, host_.shared_buffers);
  notice.output = describe(output_, output_bytes_, host_.shared_buffers);
  if (notice.input.descriptor < 0) host_.huge_pages.note(input_, input_bytes_);
  if (notice.output.descriptor < 0 && output_ != input_) host_.huge_pages.note(output_, output_bytes_);
  notice.released = host_.shared_buffers.released();
  board_.publish();
  board_.await_all(host_.patience, host_.alarm, operation_.deadline);
  for (int index = 0; index < board_.size(); ++index) {
    notices_.push_back(board_.notice(index));  // a copy: the board writes its own again two ticks later
    if (index != board_.index()) host_.peer_buffers.refresh(board_.pid_of(index), notices_.back().released);
  }
  // This rank itself reads its input, not the copy.
  notices_[static_cast<size_t>(board_.index())].input.address = reinterpret_cast<uint64_t>(operation_.input);
  for (int index = 0; index < board_.size(); ++index) {
    const Notice& theirs = notices_[static_cast<size_t>(index)];
    inputs_.emplace_back(board_, host_.peer_buffers, index, theirs.input);
    outputs_.emplace_back(board_, host_.peer_buffers, index, theirs.output);
  }
}

void Direct::close() {
  pass();
  if (output_ != operation_.output) copy_shown(operation_.output, output_);
}

void Direct::copy_shown(void* to, const void* from) const {
  for (const Slice& slice : shown_) {
    std::memcpy(static_cast<std::byte*>(to) + slice.offset, static_cast<const std::byte*>(from) + slice.offset,
                slice.bytes);
  }
}

void Direct::fold(size_t offset, size_t bytes, std::byte* out) {
  const size_t element = size_of(operation_.dtype);
  const int size = board_.size();
  std::vector<std::byte>& scratch = host_.scratch;
  scratch.resize(fold_piece_bytes * static_cast<size_t>(size));
  std::vector<const void*> sources(static_cast<size_t>(size));
  for (size_t done = 0; done < bytes; done += fold_piece_bytes) {
    const size_t piece = std::min(fold_piece_bytes, bytes - done);
    for (int step = 0; step < size; ++step) {  // each reads from another rank first, and folds in the order of ranks
      const auto index = static_cast<size_t>((board_.index() + step) % size);
      sources[index] = inputs_[index].read(offset + done, piece, scratch.data() + index * fold_piece_bytes);
    }
    combine(operation_.dtype, operation_.reduction, out + done, sources.data(), size, piece / element, size);
    host_.alarm.check();
  }
}

void Direct::take(const PeerMemory& from, size_t offset, size_t bytes, std::byte* out) {
  for (size_t done = 0; done < bytes; done += take_piece_bytes) {
    from.copy(offset + done, std::min(take_piece_bytes, bytes - done), out + done);
    host_.alarm.check();
  }
}

void Direct::take_slices(int slices, Slice block) {
  for (int step = 1; step < board_.size(); ++step) {
    const int peer = (board_.index() + step) % board_.size();
    const Slice slice = slice_of(block.bytes, slices, peer);
    const size_t offset = block.offset + slice.offset;
    take_output(peer, offset, slice.bytes, output() + offset);
  }
}

}  // namespace shoal
