// Memory of this process that peers on the host may map: tensors that live here need no copy to be
// communicated.
//
// Buffers are given back to a cache, not to the system: what trains allocates the same sizes again and again,
// and peers keep their mappings.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "transport/segment.h"

namespace shoal {

class SharedBuffers {
 public:
  // Where an address lies, if it lies in a buffer of these.
  struct Place {
    int descriptor = -1;
    SegmentIdentity segment;
    size_t offset = 0;
  };

  // At least `bytes` bytes at a page boundary; their content is not defined.
  void* allocate(size_t bytes);

  // Gives back what `allocate` gave: for use by another tensor, or, as a peer that a broken group left behind
  // may write to it still, for none.
  void release(void* data);
  void discard(void* data);

  // Gives what is in the cache back to the system.
  void trim();

  // False if [data, data + bytes) is not wholly within one buffer.
  bool find(const void* data, size_t bytes, Place& place);

  // How many buffers were given back to the system: their mappings elsewhere are void.
  uint32_t released() const { return released_.load(std::memory_order_acquire); }

  // Moves the buffer that holds this address, if one does, to new pages at the same address: a peer that a
  // broken group left behind in the middle of an operation then writes to pages that nobody reads.
  void detach(const void* data);

 private:
  static constexpr size_t cache_limit = size_t{1} << 30;

  Segment take_back(void* data);
  std::map<uintptr_t, Segment>::iterator holder_of(const void* data);
  void drop_cache();

  std::mutex mutex_;
  std::map<uintptr_t, Segment> in_use_;
  std::vector<Segment> cache_;
  size_t cached_bytes_ = 0;
  std::atomic<uint32_t> released_{0};
};

}  // namespace shoal
