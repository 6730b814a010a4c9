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

void a_place_is_found_if_it_is_wholly_within_a_buffer() {
  SharedBuffers buffers;
  auto* data = bytes_at(buffers.allocate(5000));  // two pages
  SharedBuffers::Place place;
  CHECK(buffers.find(data, 8192, place));
  CHECK(!buffers.find(data, 8193, place));
  CHECK(!buffers.find(data, SIZE_MAX, place));
  CHECK(buffers.find(data + 4000, 4192, place));
  CHECK_EQUAL(place.offset, 4000u);
  CHECK_EQUAL(place.segment.bytes, 8192u);
  CHECK(!buffers.find(data + 8192, 1, place));
  CHECK(!buffers.find(data - 1, 1, place));
  CHECK(!buffers.find(&place, 1, place));
  buffers.release(data);
  CHECK(!buffers.find(data, 1, place));
}

void buffers_of_a_size_are_used_again_where_they_were() {
  SharedBuffers buffers;
  void* first = buffers.allocate(10'000);
  const auto before = place_of(buffers, first);
  buffers.release(first);
  CHECK_EQUAL(buffers.allocate(9'999), first);
  CHECK_EQUAL(place_of(buffers, first).segment.cookie, before.segment.cookie);
  CHECK(buffers.allocate(10'000) != first);
  CHECK_EQUAL(buffers.released(), 0u);
}

void what_goes_back_to_the_system_is_counted_and_has_another_identity_from_then_on() {
  SharedBuffers buffers;
  const int descriptors = open_descriptors();
  void* cached = buffers.allocate(1);
  void* discarded = buffers.allocate(1);
  const auto cookie = place_of(buffers, discarded).segment.cookie;
  buffers.release(cached);
  buffers.trim();
  CHECK_EQUAL(buffers.released(), 1u);
  buffers.discard(discarded);
  CHECK_EQUAL(buffers.released(), 2u);
  CHECK_EQUAL(open_descriptors(), descriptors);
  void* next = buffers.allocate(1);
  CHECK(place_of(buffers, next).segment.cookie != cookie);
  const auto before = place_of(buffers, next);
  buffers.detach(next);
  CHECK_EQUAL(buffers.released(), 3u);
  CHECK(place_of(buffers, next).segment.cookie != before.segment.cookie);
  buffers.release(next);
}

// A peer's mappings: those that became void go, the others stay.
void a_peer_unmaps_what_was_given_back_and_nothing_else() {
  SharedBuffers buffers;
  void* first = buffers.allocate(500'000);
  void* second = buffers.allocate(1'000'000);
  const Location one = describe(first, 500'000, buffers), two = describe(second, 1'000'000, buffers);
  PeerBuffers peer;
  const pid_t owner = getpid();
  CHECK_EQUAL(peer.map(owner, 0, one), first);
  CHECK_EQUAL(peer.map(owner, 0, two), second);
  buffers.release(first);
  peer.refresh(owner, buffers.released());
  CHECK_EQUAL(peer.map(owner, 0, one), first);  // it is kept, and may come again
  buffers.trim();
  peer.refresh(owner, buffers.released());
  CHECK_EQUAL(peer.map(owner, 0, two), second);
  CHECK_THROWS(peer.map(owner, 3, one), Code::system);
  Location beyond = two;
  beyond.bytes = beyond.segment.bytes + 1;
  CHECK_THROWS(peer.map(owner, 3, beyond), Code::system);
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
  a_place_is_found_if_it_is_wholly_within_a_buffer();
  buffers_of_a_size_are_used_again_where_they_were();
  what_goes_back_to_the_system_is_counted_and_has_another_identity_from_then_on();
  a_peer_unmaps_what_was_given_back_and_nothing_else();
  what_is_no_buffer_is_refused();
  threads_may_share_them();
  return report();
}
