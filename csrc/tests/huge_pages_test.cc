// Room for results: which pages are made, and which stay as they are.
#include "transport/huge_pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <random>

#include "tests/check.h"

using namespace shoal;

namespace {

constexpr size_t page = 4096;

// Memory between two protected pages.
class Guarded {
 public:
  explicit Guarded(size_t pages) : bytes_((pages + 2) * page) {
    whole_ = static_cast<std::byte*>(mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(whole_ + page, pages * page, PROT_READ | PROT_WRITE);
  }
  ~Guarded() { munmap(whole_, bytes_); }
  Guarded(const Guarded&) = delete;

  std::byte* begin() const { return whole_ + page; }
  std::byte* end() const { return whole_ + bytes_ - page; }
  bool is_there(const std::byte* at) const {
    unsigned char there = 0;
    const size_t offset = static_cast<size_t>(at - whole_) / page * page;
    return mincore(whole_ + offset, 1, &there) == 0 && (there & 1) != 0;
  }

 private:
  const size_t bytes_;
  std::byte* whole_;
};

// Whether all pages are there at once, or the system makes large ones at the first write, all bytes are zeros and can
// be written, and nothing beside them was touched.
void room_is_made_within_a_buffer(size_t before, size_t bytes) {
  const Guarded memory((before + bytes + page - 1) / page);
  std::byte* const data = memory.begin() + before;
  HugePages::make_room(data, bytes);
  CHECK(std::all_of(data, data + bytes, [](std::byte each) { return each == std::byte{0}; }));
  std::fill_n(data, bytes, std::byte{7});
  CHECK(memory.is_there(data + bytes / 2));
}

void small_buffers_and_those_in_use_stay_as_they_are() {
  const Guarded small(100), large(4096);
  HugePages::make_room(small.begin(), 100 * page);
  CHECK(!small.is_there(small.begin()));
  std::byte* const middle = large.begin() + 2048 * page;
  *middle = std::byte{7};
  HugePages::make_room(large.begin(), 4096 * page);
  CHECK(*middle == std::byte{7});
  CHECK(!large.is_there(large.begin()));  // the touched page in the middle was seen, so nothing was done
}

void buffers_between_large_pages_are_populated() {
  const Guarded memory(300);  // more than is worth asking for, and never all of a page of 2 MiB
  HugePages::make_room(memory.begin(), 300 * page);
  CHECK(memory.is_there(memory.begin()));
  CHECK(memory.is_there(memory.end() - 1));
}

}  // namespace

int main() {
  std::mt19937 random(1);
  for (int index = 0; index < 40; ++index) {
    room_is_made_within_a_buffer(random() % (3 * page), random() % (12 << 20) + 1);
  }
  small_buffers_and_those_in_use_stay_as_they_are();
  buffers_between_large_pages_are_populated();
  return report();
}
