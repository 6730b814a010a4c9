#include "transport/ring_link.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "transport/peer_memory.h"

namespace shoal {

namespace {

// From this size on, a system call costs less than a second copy.
constexpr size_t least_shown = 32 * 1024;

// The most bytes to take at once, so that other links are served in between.
constexpr size_t most_taken = 128 * 1024;

}  // namespace

size_t RingLink::send(const void* data, size_t size) {
  const uint64_t shown = outward_.shown.load(std::memory_order_relaxed);
  if (counted_ != shown) {
    const uint64_t taken = outward_.taken.load(std::memory_order_acquire);
    const uint64_t before = std::exchange(counted_, taken);
    return static_cast<size_t>(taken - before);
  }
  if (!may_show_ || size < least_shown) return write(data, size);
  outward_.shown_end = reinterpret_cast<uint64_t>(data) + size;
  outward_.shown.store(shown + size, std::memory_order_release);
  ring_doorbell();
  return 0;
}

size_t RingLink::receive(void* data, size_t size) {
  const uint64_t shown = inward_.shown.load(std::memory_order_acquire);
  const size_t count = read(data, size);  // written before, if anything is shown
  return count > 0 ? count : take(data, size, shown);
}

// The counts only grow; a position is the count modulo the capacity, and a piece ends at the ring's end at most.

size_t RingLink::write(const void* data, size_t size) {
  const uint64_t written = outward_.written.load(std::memory_order_relaxed);
  const uint64_t read = outward_.read.load(std::memory_order_acquire);
  const size_t total = std::min(size, Ring::capacity - static_cast<size_t>(written - read));
  if (total == 0) return 0;
  const size_t position = written % Ring::capacity;
  const size_t first = std::min(total, Ring::capacity - position);
  std::memcpy(outward_.bytes + position, data, first);
  std::memcpy(outward_.bytes, static_cast<const std::byte*>(data) + first, total - first);
  outward_.written.store(written + total, std::memory_order_release);
  ring_doorbell();
  return total;
}

size_t RingLink::read(void* data, size_t size) {
  const uint64_t read = inward_.read.load(std::memory_order_relaxed);
  const uint64_t written = inward_.written.load(std::memory_order_acquire);
  const size_t total = std::min(size, static_cast<size_t>(written - read));
  if (total == 0) return 0;
  const size_t position = read % Ring::capacity;
  const size_t first = std::min(total, Ring::capacity - position);
  std::memcpy(data, inward_.bytes + position, first);
  std::memcpy(static_cast<std::byte*>(data) + first, inward_.bytes, total - first);
  inward_.read.store(read + total, std::memory_order_release);
  ring_doorbell();
  return total;
}

size_t RingLink::take(void* data, size_t size, uint64_t shown) {
  const uint64_t taken = inward_.taken.load(std::memory_order_relaxed);
  const size_t left = static_cast<size_t>(shown - taken);
  const size_t count = std::min({size, left, most_taken});
  if (count == 0) return 0;
  read_process(pid_, rank_, inward_.shown_end - left, count, data);
  inward_.taken.store(taken + count, std::memory_order_release);
  ring_doorbell();
  return count;
}

void RingLink::ring_doorbell() {
  doorbell_.value.fetch_add(1, std::memory_order_seq_cst);
  if (doorbell_.sleepers.load(std::memory_order_seq_cst) != 0) doorbell_.wake();
}

}  // namespace shoal
