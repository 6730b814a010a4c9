// Memory that peers read again and again, put on huge pages.
//
// process_vm_readv looks up every page that it reads, which with pages of 4 KiB takes longer than the copying.
// Buffers that are communicated once are left alone: putting them on huge pages copies them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

namespace shoal {

class HugePages {
 public:
  // Says that peers are about to read these bytes of private memory. From any thread.
  void note(const void* data, size_t bytes);

  // Says that these bytes are about to be written. If nobody touched them yet, their pages are made huge, or at least
  // all at once, which takes less time than the faults of as many small ones.
  static void make_room(void* data, size_t bytes);

 private:
  static constexpr size_t most_entries = 1024;

  std::mutex mutex_;
  std::map<std::pair<uintptr_t, size_t>, uint32_t> times_;  // by address and size: how often it was noted
};

}  // namespace shoal
