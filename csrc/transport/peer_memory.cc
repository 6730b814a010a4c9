#include "transport/peer_memory.h"

#include <sys/uio.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "common/reduce.h"

namespace shoal {

namespace {

// What is smaller is still in a cache when it is next used.
constexpr size_t worth_streaming = 4 * 1024 * 1024;

}  // namespace

Location describe(const void* data, size_t bytes, SharedBuffers& buffers) {
  Location region;
  region.address = reinterpret_cast<uint64_t>(data);
  region.bytes = bytes;
  SharedBuffers::Place place;
  if (bytes > 0 && buffers.find(data, bytes, place)) {
    region.descriptor = place.descriptor;
    region.buffer = place.number;
    region.buffer_bytes = place.buffer_bytes;
    region.offset = place.offset;
  }
  return region;
}

std::byte* PeerBuffers::map(pid_t pid, int rank, const Location& region) {
  auto [found, is_new] = mapped_.try_emplace({pid, region.buffer});
  if (is_new) {
    try {
      found->second = Segment::attach(pid, region.descriptor, region.buffer_bytes, rank);
    } catch (...) {
      mapped_.erase(found);
      throw;
    }
  }
  return found->second.data() + region.offset;
}

void PeerBuffers::refresh(pid_t pid, uint32_t released) {
  uint32_t& known = released_[pid];
  if (known == released) return;
  known = released;
  mapped_.erase(mapped_.lower_bound({pid, 0}), mapped_.upper_bound({pid, UINT32_MAX}));
}

void read_process(pid_t pid, int rank, uint64_t address, size_t bytes, void* out) {
  auto* to = static_cast<std::byte*>(out);
  while (bytes > 0) {
    iovec here{to, bytes};
    iovec there{reinterpret_cast<void*>(address), bytes};
    const ssize_t moved = process_vm_readv(pid, &here, 1, &there, 1, 0);
    if (moved <= 0) {
      if (errno == ESRCH) throw Failure(Code::peer_lost, rank, "the process of rank " + std::to_string(rank) + " ended");
      throw system_failure("the memory of rank " + std::to_string(rank) + " cannot be read", errno, rank);
    }
    to += moved, address += static_cast<uint64_t>(moved), bytes -= static_cast<size_t>(moved);
  }
}

PeerMemory::PeerMemory(Board& board, PeerBuffers& buffers, int index, const Location& region)
    : region_(&region), pid_(board.pid_of(index)), rank_(board.rank_of(index)) {
  if (index == board.index()) {
    mapped_ = reinterpret_cast<std::byte*>(region.address);
  } else if (region.descriptor >= 0) {
    mapped_ = buffers.map(pid_, rank_, region);
  }
}

const void* PeerMemory::read(size_t offset, size_t bytes, void* scratch) const {
  if (mapped_ != nullptr) return mapped_ + offset;
  copy(offset, bytes, scratch);
  return scratch;
}

void PeerMemory::copy(size_t offset, size_t bytes, void* out) const {
  if (mapped_ == nullptr) return read_process(pid_, rank_, region_->address + offset, bytes, out);
  const std::byte* from = mapped_ + offset;
  if (from == out) return;
  if (bytes > worth_streaming) {
    copy_streaming(out, from, bytes);
  } else {
    std::memcpy(out, from, bytes);
  }
}

}  // namespace shoal
