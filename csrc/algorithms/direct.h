// One operation in which the ranks of a host read each other's buffers: how peers reach this rank's buffers, and how it
// reaches theirs.
#pragma once

#include <cstddef>
#include <vector>

#include "algorithms/host.h"
#include "algorithms/operation.h"

namespace shoal {

struct Slice {
  size_t offset, bytes;
};

// The index-th of `parts` slices of a buffer, cut at cache lines; from `parts` on they are empty.
Slice slice_of(size_t bytes, int parts, int index);

// A buffer without one of its slices.
std::vector<Slice> all_but(Slice own, size_t bytes);

// A copy of private memory that peers can reach. It is used where the system forbids to read each other's memory, and
// where a copy takes less time than the system's look-up of the pages.
class Bounce {
 public:
  // Allocates the copy if `data` needs one. Up to `limit` bytes always need one, even if peers could read them.
  Bounce(Host& host, const void* data, size_t bytes, size_t limit);
  ~Bounce();
  Bounce(const Bounce&) = delete;

  void* copy() const { return copy_; }  // null if there is none

 private:
  SharedBuffers& buffers_;
  const int exceptions_;  // in flight when this was made
  void* copy_ = nullptr;
};

class Direct {
 public:
  // Shows the first `input_bytes` of the operation's input and the first `output_bytes` of its output. The peers read
  // and write only the `shown` parts of both: by default, all of the input.
  Direct(const Operation& operation, Host& host, size_t input_bytes, size_t output_bytes, std::vector<Slice> shown);
  Direct(const Operation& operation, Host& host, size_t input_bytes, size_t output_bytes)
      : Direct(operation, host, input_bytes, output_bytes, {{0, input_bytes}}) {}

  // Tells all ranks where this rank's buffers are, and waits for theirs.
  void open();

  // Waits until all ranks have reached this point.
  void pass() { board_.pass(host_.patience, host_.alarm, operation_.deadline); }

  // Waits until all ranks have read what they need, and copies a result that was written elsewhere to the caller.
  void close();

  // Folds the input of all ranks from `offset` into `out`.
  void fold(size_t offset, size_t bytes, std::byte* out);

  // Takes bytes of a peer's input or output.
  void take_input(int index, size_t offset, size_t bytes, std::byte* out) {
    take(inputs_[static_cast<size_t>(index)], offset, bytes, out);
  }
  void take_output(int index, size_t offset, size_t bytes, std::byte* out) {
    take(outputs_[static_cast<size_t>(index)], offset, bytes, out);
  }

  // Takes the `slices` slices of a block of the result from the ranks that folded them.
  void take_slices(int slices, Slice block);

  std::byte* output() const { return static_cast<std::byte*>(output_); }

 private:
  void copy_shown(void* to, const void* from) const;
  void take(const PeerMemory& from, size_t offset, size_t bytes, std::byte* out);

  const Operation& operation_;
  Host& host_;
  Board& board_;
  const size_t input_bytes_, output_bytes_;
  const std::vector<Slice> shown_;
  const bool in_place_;
  Bounce input_bounce_, output_bounce_;
  const void* input_;  // as shown
  void* output_;
  std::vector<Notice> notices_;
  std::vector<PeerMemory> inputs_, outputs_;
};

}  // namespace shoal
