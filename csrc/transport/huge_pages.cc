#include "transport/huge_pages.h"

#include <sys/mman.h>

#include <bit>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

namespace shoal {

namespace {
constexpr uintptr_t page = 4096, huge_page = 2 * 1024 * 1024;

// Below this, a system call costs more than a page fault or two.
constexpr size_t worth_asking = 512 * 1024;

uintptr_t rounded_up(uintptr_t address, uintptr_t unit) { return (address + unit - 1) / unit * unit; }

bool is_untouched(uintptr_t address) {
  unsigned char is_there = 1;
  return mincore(reinterpret_cast<void*>(address / page * page), 1, &is_there) == 0 && (is_there & 1) == 0;
}

void populate(uintptr_t begin, uintptr_t end) {
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_WRITE);
}
}  // namespace

void HugePages::make_room(void* data, size_t bytes) {
  if (bytes < worth_asking) return;
  const auto begin = reinterpret_cast<uintptr_t>(data), end = begin + bytes;
  if (!is_untouched(begin + bytes / 2)) return;
  const uintptr_t first_page = begin / page * page, last_page = rounded_up(end, page);
  const uintptr_t first = rounded_up(begin, huge_page), last = end / huge_page * huge_page;
  if (first >= last) return populate(first_page, last_page);
  madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);  // made by the first write to each
  populate(first_page, first);
  populate(last, last_page);
}

void HugePages::note(const void* data, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = rounded_up(begin, huge_page);
  const uintptr_t last = (begin + bytes) / huge_page * huge_page;
  if (first >= last) return;
  uint32_t times;
  {
    std::lock_guard lock(mutex_);
    if (times_.size() == most_entries) times_.clear();
    times = ++times_[{begin, bytes}];
  }
  // At the second time, the fourth, the eighth and so on: the allocator may have used the same addresses again. If the
  // pages are huge already, this costs almost nothing; if the system refuses, the pages stay as they are.
  if (times >= 2 && std::has_single_bit(times)) {
    madvise(reinterpret_cast<void*>(first), last - first, MADV_COLLAPSE);
  }
}

}  // namespace shoal
