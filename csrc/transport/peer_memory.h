// Access to the buffers of another rank on the same host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>

#include "transport/board.h"
#include "transport/segment.h"
#include "transport/shared_buffers.h"

namespace shoal {

// Where `data` lies, for the others: in a shared buffer if it lies in one.
Location describe(const void* data, size_t bytes, SharedBuffers& buffers);

// The segments of peers' shared buffers that this process has mapped, kept for the next time.
//
// The owner may close a segment's descriptor at any time when no region of it is shown. Mapped segments stay readable,
// and are found by their cookie, so a new segment is never taken for an old one.
class PeerBuffers {
 public:
  // If the system has no descriptors left, unused buffers that `own` keeps are given back.
  explicit PeerBuffers(SharedBuffers& own) : own_(own) {}

  // The first byte of `region`, which is in a shared buffer of the process `pid`.
  std::byte* map(pid_t pid, int rank, const Location& region);

  // Unmaps the segments that the process has given back, if its count has changed.
  void refresh(pid_t pid, uint32_t released);

 private:
  SharedBuffers& own_;
  std::map<std::pair<pid_t, uint64_t>, Segment> mapped_;  // by process and cookie
  std::map<pid_t, uint32_t> released_;
};

// Copies bytes out of the memory of another process. Throws Failure: peer_lost if it ended; system if it cannot be
// read. Failures name `rank`.
void read_process(pid_t pid, int rank, uint64_t address, size_t bytes, void* out);

// A region of a peer, to be read in pieces: in place where it is mapped, by process_vm_readv otherwise.
class PeerMemory {
 public:
  PeerMemory(Board& board, PeerBuffers& buffers, int index, const Location& region);

  // The first byte, or null if the region is in the peer's private memory.
  std::byte* mapped() const { return mapped_; }
  size_t bytes() const { return region_->bytes; }

  // The bytes from `offset`: in place, or copied to `scratch`.
  const void* read(size_t offset, size_t bytes, void* scratch) const;

  // Copies the bytes from `offset` to `out`.
  void copy(size_t offset, size_t bytes, void* out) const;

 private:
  const Location* region_;
  std::byte* mapped_ = nullptr;
  pid_t pid_;
  int rank_;
};

}  // namespace shoal
