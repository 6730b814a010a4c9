// Memory of this process that peers on the host may map: tensors that live here need no copy to be
// communicated.
//
// Memory is in slabs: a segment each, cut into blocks of one size. A small buffer is a block of 4 KiB, 8 KiB and so on
// in a slab of 1 MiB, so that thousands of them take few descriptors; a large one has a slab to itself.
//
// Buffers are given back to their slab, and slabs without buffers are kept, not given back to the system: training
// allocates the same sizes again and again, and peers keep their mappings. The kept slabs are limited in bytes and in
// number, because each holds a descriptor; the least recently used slabs go first.
//
// The caller that allocated a buffer owns it, and gives it back when no peer uses it any more. If a peer may still use
// it, because the group failed, the buffer is discarded: its pages are never used again, and stay until the peer unmaps
// them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "transport/segment.h"

namespace shoal {

class SharedBuffers {
 public:
  // The place of an address in one of these buffers.
  struct Place {
    int descriptor = -1;      // of the segment
    SegmentIdentity segment;
    size_t offset = 0;        // in the segment
  };

  // `most_kept`: slabs without buffers, at most. By default a part of the descriptors that the process may have.
  explicit SharedBuffers(size_t most_kept = default_most_kept());

  // At least `bytes` bytes at a page boundary; their content is not defined.
  void* allocate(size_t bytes);

  // Gives back a buffer from `allocate`: for use by another tensor, or for no use, because a peer may still write to it
  // after its group failed.
  void release(void* data);
  void discard(void* data);

  // Gives unused memory back to the system. Returns the number of bytes.
  size_t trim();

  // False if [data, data + bytes) is not wholly within one buffer.
  bool find(const void* data, size_t bytes, Place& place);

  // How many segments were given back to the system: their mappings elsewhere are void.
  uint32_t released() const { return released_.load(std::memory_order_acquire); }

  // Moves the buffer that holds this address, if one does, to new pages at the same address: a peer that is still in
  // the middle of an operation after its group failed then writes to pages that are not read.
  void detach(const void* data);

 private:
  enum class Block : uint8_t { free, used, lost };  // lost: never used again

  struct Slab {
    Segment segment;
    size_t block_bytes;
    std::vector<Block> blocks;
    std::vector<size_t> free;           // by index: the last is the next to be used
    size_t used = 0;
    std::map<size_t, Segment> moved;    // blocks that were detached, by index
    std::list<Slab*>::iterator listed;  // in `kept_` or `busy_`
  };

  static constexpr size_t slab_bytes = size_t{1} << 20;
  static constexpr size_t largest_small = slab_bytes / 8;
  static constexpr size_t most_kept_bytes = size_t{1} << 30;

  static size_t default_most_kept();
  Slab& slab_with_room(size_t block_bytes);
  Segment make_segment(size_t bytes);
  std::pair<Slab*, size_t> block_at(const void* data);
  std::pair<Slab*, size_t> buffer_at(const void* data);
  void take_from(Slab& slab, size_t index, Block becomes);
  bool forget_moved(Slab& slab, size_t index);
  void forget(Slab& slab);
  void give_back_oldest();

  const size_t most_kept_;
  std::mutex mutex_;
  std::map<uintptr_t, Slab> slabs_;                   // by address
  std::map<size_t, std::vector<Slab*>> with_room_;    // by the size of their blocks: the last is the next to be used
  std::list<Slab*> busy_, kept_;                      // with and without buffers; kept: the oldest first
  size_t kept_bytes_ = 0;
  std::atomic<uint32_t> released_{0};
};

}  // namespace shoal
