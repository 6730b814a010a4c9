// Memory that peers read again and again, put on huge pages.
//
// process_vm_readv looks up every page that it reads, which takes longer than the copy with pages of 4 KiB. Buffers
// that are communicated once stay as they are: moving them to huge pages copies them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

namespace shoal {

class HugePages {
 public:
  // Notes that peers will read these bytes of private memory. From any thread.
  void note(const void* data, size_t bytes);

  // Prepares bytes that will be written. If they were not touched yet, their pages are made huge, or at least all at
  // once, which takes less time than a fault for each small page.
  static void make_room(void* data, size_t bytes);

 private:
  static constexpr size_t most_entries = 1024;

  std::mutex mutex_;
  std::map<std::pair<uintptr_t, size_t>, uint32_t> times_;  // by address and size: how often it was noted
};

}  // namespace shoal
