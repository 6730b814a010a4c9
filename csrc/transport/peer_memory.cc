#include "transport/peer_memory.h"

#include <sys/uio.h>

#include <cerrno>
#include <cstring>
#include <iterator>
#include <string>

#include "common/reduce.h"

namespace shoal {

namespace {

// Smaller data is still in a cache at its next use.
constexpr size_t worth_streaming = 4 * 1024 * 1024;

}  // namespace

Location describe(const void* data, size_t bytes, SharedBuffers& buffers) {
  Location region;
  region.address = reinterpret_cast<uint64_t>(data);
  region.bytes = bytes;
  SharedBuffers::Place place;
  if (bytes > 0 && buffers.find(data, bytes, place)) {
    region.descriptor = place.descriptor;
    region.segment = place.segment;
    region.offset = place.offset;
  }
  return region;
}

std::byte* PeerBuffers::map(pid_t pid, int rank, const Location& region) {
  const size_t bytes = region.segment.bytes;
  if (region.offset > bytes || region.bytes > bytes - region.offset) {
    throw Failure(Code::system, rank, "rank " + std::to_string(rank) + " shows more than its buffer has");
  }
  const std::pair key(pid, region.segment.cookie);
  auto found = mapped_.find(key);
  if (found == mapped_.end()) {
    const auto attach = [&] { return Segment::attach(pid, region.descriptor, region.segment, rank); };
    Segment segment;
    try {
      segment = attach();
    } catch (const Failure& failure) {
      if (!has_run_out(failure.error)) throw;
      own_.trim();
      segment = attach();
    }
    found = mapped_.emplace(key, std::move(segment)).first;
  }
  return found->second.data() + region.offset;
}

void PeerBuffers::refresh(pid_t pid, uint32_t released) {
  uint32_t& known = released_[pid];
  if (known == released) return;
  known = released;
  auto each = mapped_.lower_bound({pid, 0});
  while (each != mapped_.end() && each->first.first == pid) {
    each = each->second.is_void() ? mapped_.erase(each) : std::next(each);
  }
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
