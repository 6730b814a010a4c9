#include "transport/ring_link.h"

#include <algorithm>
#include <cstring>

namespace shoal {

// The counts only grow; a position is the count modulo the capacity, and a piece ends at the ring's end at most.

size_t RingLink::send(const void* data, size_t size) {
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

size_t RingLink::receive(void* data, size_t size) {
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

void RingLink::ring_doorbell() {
  doorbell_.value.fetch_add(1, std::memory_order_seq_cst);
  if (doorbell_.sleepers.load(std::memory_order_seq_cst) != 0) doorbell_.wake();
}

}  // namespace shoal
