#include "transport/shared_buffers.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <thread>

#include "tests/check.h"
#include "tests/network_ranks.h"
#include "transport/peer_memory.h"

using namespace shoal;
using namespace shoal::testing;

namespace {

SharedBuffers::Place place_of(SharedBuffers& buffers, const void* data, size_t bytes = 1) {
  SharedBuffers::Place place;
  CHECK(buffers.find(data, bytes, place));
  return place;
}

std::byte* bytes_at(void* data) { return static_cast<std::byte*>(data); }

// In processes of their own, so before this one has threads.
void another_process_has_the_same_memory_until_it_is_detached() {
  SharedBuffers buffers;
  auto* data = bytes_at(buffers.allocate(100'000));
  const auto place = place_of(buffers, data);
  const pid_t owner = getpid();
  SharedWithChildren<std::atomic<int>> stage;
  Child child([&] {
    Segment segment = Segment::attach(owner, place.descriptor, place.buffer_bytes, 0);
    segment.data()[99'999] = std::byte{42};
    stage->store(1);
    if (!comes_true([&] { return stage->load() == 2; })) throw Failure(Code::timeout, -1, "not detached");
    segment.data()[0] = std::byte{13};
    stage->store(3);
  });
  CHECK(comes_true([&] { return stage->load() == 1; }));
  CHECK(data[99'999] == std::byte{42});
  buffers.detach(data + 50);
  CHECK(data[99'999] == std::byte{42});
  stage->store(2);
  CHECK(comes_true([&] { return stage->load() == 3; }));
  CHECK(data[0] == std::byte{0});
  buffers.release(data);
}

void a_segment_is_mapped_once_in_a_process() {
  Segment own = Segment::create(10'000);
  Segment attached = Segment::attach(getpid(), own.descriptor(), 10'000, 0);
  CHECK_EQUAL(attached.data(), own.data());
  attached.data()[5] = std::byte{1};
  const int descriptor = own.descriptor();
  own = Segment();
  CHECK(attached.data()[5] == std::byte{1});  // it is there for as long as somebody has it
  CHECK_THROWS(Segment::attach(getpid(), descriptor, 10'000, 0), Code::system);
}

void a_place_is_found_if_it_is_wholly_within_a_buffer() {
  SharedBuffers buffers;
  auto* data = bytes_at(buffers.allocate(5000));  // two pages
  SharedBuffers::Place place;
  CHECK(buffers.find(data, 8192, place));
  CHECK(!buffers.find(data, 8193, place));
  CHECK(!buffers.find(data, SIZE_MAX, place));
  CHECK(buffers.find(data + 4000, 4192, place));
  CHECK_EQUAL(place.offset, 4000u);
  CHECK_EQUAL(place.buffer_bytes, 8192u);
  CHECK(!buffers.find(data + 8192, 1, place));
  CHECK(!buffers.find(data - 1, 1, place));
  CHECK(!buffers.find(&place, 1, place));
  buffers.release(data);
  CHECK(!buffers.find(data, 1, place));
}

void buffers_of_a_size_are_used_again_with_their_number() {
  SharedBuffers buffers;
  void* first = buffers.allocate(10'000);
  const auto before = place_of(buffers, first);
  buffers.release(first);
  CHECK_EQUAL(buffers.allocate(9'999), first);
  CHECK_EQUAL(place_of(buffers, first).number, before.number);
  CHECK(buffers.allocate(10'000) != first);
  CHECK_EQUAL(buffers.released(), 0u);
}

void what_goes_back_to_the_system_is_counted_and_its_number_is_never_used_again() {
  SharedBuffers buffers;
  const int descriptors = open_descriptors();
  void* cached = buffers.allocate(1);
  void* discarded = buffers.allocate(1);
  const auto number = place_of(buffers, discarded).number;
  buffers.release(cached);
  buffers.trim();
  CHECK_EQUAL(buffers.released(), 1u);
  buffers.discard(discarded);
  CHECK_EQUAL(buffers.released(), 2u);
  CHECK_EQUAL(open_descriptors(), descriptors);
  void* next = buffers.allocate(1);
  CHECK(place_of(buffers, next).number > number);
  const auto before = place_of(buffers, next);
  buffers.detach(next);
  CHECK_EQUAL(buffers.released(), 3u);
  CHECK(place_of(buffers, next).number > before.number);
  buffers.release(next);
}

void what_is_no_buffer_is_refused() {
  SharedBuffers buffers;
  auto* data = bytes_at(buffers.allocate(100));
  CHECK_THROWS(buffers.release(data + 1), Code::invalid);
  CHECK_THROWS(buffers.discard(data + 1), Code::invalid);
  buffers.release(data);
  CHECK_THROWS(buffers.release(data), Code::invalid);
  buffers.detach(data);  // of private memory: nothing to do
  CHECK_EQUAL(buffers.released(), 0u);
  CHECK_THROWS(buffers.allocate(size_t{1} << 62), Code::system);
}

void threads_may_share_them() {
  SharedBuffers buffers;
  const auto work = [&](unsigned seed) {
    std::mt19937 random(seed);
    std::vector<std::byte*> held;
    for (int turn = 0; turn < 500; ++turn) {
      if (held.size() < 5 || random() % 2 == 0) {
        held.push_back(bytes_at(buffers.allocate(1 + random() % 20'000)));
        *held.back() = static_cast<std::byte>(seed);
      } else {
        const size_t which = random() % held.size();
        CHECK(*held[which] == static_cast<std::byte>(seed));
        random() % 3 == 0 ? buffers.discard(held[which]) : buffers.release(held[which]);
        held.erase(held.begin() + static_cast<std::ptrdiff_t>(which));
      }
      SharedBuffers::Place place;
      if (!held.empty()) CHECK(buffers.find(held[0], 1, place));
      if (random() % 50 == 0) buffers.trim();
    }
    for (std::byte* data : held) buffers.release(data);
  };
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 3; ++seed) threads.emplace_back(work, seed);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main() {
  another_process_has_the_same_memory_until_it_is_detached();
  a_segment_is_mapped_once_in_a_process();
  a_place_is_found_if_it_is_wholly_within_a_buffer();
  buffers_of_a_size_are_used_again_with_their_number();
  what_goes_back_to_the_system_is_counted_and_its_number_is_never_used_again();
  what_is_no_buffer_is_refused();
  threads_may_share_them();
  return report();
}
