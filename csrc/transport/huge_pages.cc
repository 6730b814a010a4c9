#include "transport/huge_pages.h"

#include <sys/mman.h>

#include <bit>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1
#endif

namespace shoal {

namespace {
constexpr uintptr_t huge_page = 2 * 1024 * 1024;
}

void HugePages::note(const void* data, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (begin + huge_page - 1) / huge_page * huge_page;
  const uintptr_t last = (begin + bytes) / huge_page * huge_page;
  if (first >= last) return;
  uint32_t times;
  {
    std::lock_guard lock(mutex_);
    if (times_.size() == most_entries) times_.clear();
    times = ++times_[{begin, bytes}];
  }
  // At the second time, the fourth, the eighth and so on: the allocator may have given the same addresses out anew
  // meanwhile. Where the pages are huge already that takes next to nothing; where the system refuses, it stays.
  if (times >= 2 && std::has_single_bit(times)) {
    madvise(reinterpret_cast<void*>(first), last - first, MADV_COLLAPSE);
  }
}

}  // namespace shoal
