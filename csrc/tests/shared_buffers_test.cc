#include "transport/shared_buffers.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/check.h"
#include "tests/network_ranks.h"
#include "transport/peer_memory.h"
#include "transport/process.h"

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
  CHECK_EQUAL(place.offset, place_of(buffers, data).offset + 4000);
  CHECK(!buffers.find(data + 8192, 1, place));
  CHECK(!buffers.find(data - 1, 1, place));
  CHECK(!buffers.find(&place, 1, place));
  buffers.release(data);
  CHECK(!buffers.find(data, 1, place));
}

// A small size, and one that has a segment to itself.
constexpr size_t sizes[] = {10'000, 1'000'000};

void buffers_of_a_size_are_used_again_where_they_were() {
  for (const size_t bytes : sizes) {
    SharedBuffers buffers;
    void* first = buffers.allocate(bytes);
    const auto before = place_of(buffers, first);
    buffers.release(first);
    CHECK_EQUAL(buffers.allocate(bytes - 1), first);
    CHECK_EQUAL(place_of(buffers, first).segment.cookie, before.segment.cookie);
    CHECK(buffers.allocate(bytes) != first);
    CHECK_EQUAL(buffers.released(), 0u);
  }
}

void what_goes_back_to_the_system_is_counted_and_has_another_identity_from_then_on() {
  for (const size_t bytes : sizes) {
    SharedBuffers buffers;
    const int descriptors = open_descriptors();
    void* kept = buffers.allocate(bytes);
    std::memset(kept, 1, bytes);
    const auto before = place_of(buffers, kept);
    buffers.release(kept);
    CHECK(buffers.trim() >= bytes);
    CHECK_EQUAL(buffers.trim(), 0u);
    CHECK_EQUAL(buffers.released(), 1u);
    CHECK_EQUAL(open_descriptors(), descriptors);
    void* discarded = buffers.allocate(bytes);
    CHECK(place_of(buffers, discarded).segment.cookie != before.segment.cookie);
    buffers.discard(discarded);
    CHECK_EQUAL(buffers.released(), 2u);
    CHECK_EQUAL(open_descriptors(), descriptors);
  }
}

void what_is_detached_has_its_content_at_its_place_in_another_segment() {
  for (const size_t bytes : sizes) {
    SharedBuffers buffers;
    auto* data = bytes_at(buffers.allocate(bytes));
    auto* neighbour = bytes_at(buffers.allocate(bytes));
    std::memset(data, 1, bytes);
    std::memset(neighbour, 2, bytes);
    for (int time = 0; time < 2; ++time) {
      const auto before = place_of(buffers, data + 50);
      Segment theirs = Segment::attach(getpid(), before.descriptor, before.segment, 0);
      buffers.detach(data + 50);
      const auto after = place_of(buffers, data + 50);
      CHECK(after.segment.cookie != before.segment.cookie);
      Segment now = Segment::attach(getpid(), after.descriptor, after.segment, 0);
      CHECK_EQUAL(now.data() + after.offset, data + 50);
      CHECK(data[0] == std::byte{1} && data[bytes - 1] == std::byte{1});
      CHECK_EQUAL(place_of(buffers, neighbour).segment.cookie == before.segment.cookie, bytes == sizes[0] && time == 0);
    }
    CHECK(neighbour[0] == std::byte{2} && neighbour[bytes - 1] == std::byte{2});
    buffers.release(data);
    if (bytes == sizes[0]) CHECK(buffers.allocate(bytes) != data);  // a peer may be writing to its old place
    buffers.discard(neighbour);
    SharedBuffers::Place place;
    CHECK(!buffers.find(neighbour, 1, place));
  }
}

void small_buffers_share_segments_and_do_not_overlap() {
  SharedBuffers buffers;
  const int descriptors = open_descriptors();
  std::vector<std::byte*> held;
  for (size_t index = 0; index < 900; ++index) {
    held.push_back(bytes_at(buffers.allocate(4000)));
    std::memset(held.back(), static_cast<int>(index % 251), 4000);
  }
  CHECK(open_descriptors() - descriptors <= 4);
  for (size_t index = 0; index < held.size(); ++index) {
    CHECK(held[index][0] == std::byte(index % 251) && held[index][3999] == std::byte(index % 251));
  }
  // Of slabs that are still in use, the memory of the other blocks goes back.
  for (size_t index = 1; index < held.size(); ++index) buffers.release(held[index]);
  CHECK(buffers.trim() >= 890 * 4096);
  CHECK_EQUAL(buffers.trim(), 0u);
  CHECK_EQUAL(open_descriptors() - descriptors, 1);
  CHECK(held[0][3999] == std::byte{0});
  buffers.release(held[0]);
}

void no_more_than_so_many_segments_are_kept_the_latest_ones() {
  SharedBuffers buffers(3);
  const int descriptors = open_descriptors();
  std::vector<void*> held;
  for (size_t index = 0; index < 6; ++index) held.push_back(buffers.allocate((index + 1) * 500'000));
  const auto latest = place_of(buffers, held[1]);
  for (const size_t index : {4, 0, 5, 2, 3, 1}) buffers.release(held[index]);
  CHECK_EQUAL(open_descriptors() - descriptors, 3);
  CHECK_EQUAL(buffers.released(), 3u);
  CHECK_EQUAL(buffers.allocate(2 * 500'000), held[1]);
  CHECK_EQUAL(place_of(buffers, held[1]).segment.cookie, latest.segment.cookie);
  CHECK_EQUAL(buffers.allocate(4 * 500'000), held[3]);
  CHECK_EQUAL(buffers.allocate(3 * 500'000), held[2]);
  CHECK_EQUAL(buffers.released(), 3u);
  // A buffer that is larger than all kept ones together does not displace them.
  SharedBuffers others;
  void* small = others.allocate(500'000);
  void* large = others.allocate((size_t{1} << 30) + 1);
  others.release(small);
  others.release(large);
  CHECK_EQUAL(others.released(), 1u);
  CHECK_EQUAL(others.allocate(500'000), small);
}

// When the system refuses a buffer, giving back the kept ones helps; without any, the failure says what to change.
void a_process_without_descriptors_left_uses_those_of_the_buffers_that_are_kept() {
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  SharedBuffers buffers;
  void* kept = buffers.allocate(1'000'000);
  buffers.release(kept);
  rlimit low = before;
  low.rlim_cur = 100;
  setrlimit(RLIMIT_NOFILE, &low);
  std::vector<Descriptor> taken;
  while (taken.empty() || taken.back()) taken.emplace_back(open("/dev/null", O_RDONLY | O_CLOEXEC));
  CHECK(buffers.allocate(2'000'000) != nullptr);
  CHECK_EQUAL(buffers.released(), 1u);
  try {
    buffers.allocate(3'000'000);
    CHECK(false);
  } catch (const Failure& failure) {
    const std::string text = failure.what();
    CHECK_EQUAL(failure.code, Code::system);
    CHECK_EQUAL(failure.error, EMFILE);
    for (const char* said : {"3014656 bytes", "the limit is 100", "ulimit -n", "in use: 1"}) {
      CHECK(text.find(said) != std::string::npos);
    }
  }
  taken.clear();
  CHECK(buffers.allocate(3'000'000) != nullptr);
  setrlimit(RLIMIT_NOFILE, &before);
}

void the_limit_of_descriptors_is_raised_and_never_lowered() {
  rlimit before{}, now{};
  getrlimit(RLIMIT_NOFILE, &before);
  rlimit low = before;
  low.rlim_cur = std::min<rlim_t>(256, before.rlim_max);
  setrlimit(RLIMIT_NOFILE, &low);
  CHECK_EQUAL(descriptor_limit(), low.rlim_cur);
  raise_descriptor_limit();
  getrlimit(RLIMIT_NOFILE, &now);
  CHECK_EQUAL(now.rlim_cur, std::min<rlim_t>(before.rlim_max, 65'536));
  CHECK_EQUAL(now.rlim_max, before.rlim_max);
  setrlimit(RLIMIT_NOFILE, &before);
  const size_t limit = descriptor_limit();
  raise_descriptor_limit();
  CHECK(descriptor_limit() >= limit);
  setrlimit(RLIMIT_NOFILE, &before);
}

// A peer's mappings: those that became void go, the others stay.
void a_peer_unmaps_what_was_given_back_and_nothing_else() {
  SharedBuffers buffers;
  void* first = buffers.allocate(500'000);
  void* second = buffers.allocate(1'000'000);
  const Location one = describe(first, 500'000, buffers), two = describe(second, 1'000'000, buffers);
  PeerBuffers peer(buffers);
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

// Without descriptors left, an attaching process gives back those that its own buffers do not need.
void a_peers_buffer_is_mapped_once_kept_ones_are_given_back() {
  int ready[2], done[2];
  CHECK_EQUAL(pipe(ready), 0);
  CHECK_EQUAL(pipe(done), 0);
  const pid_t owner = fork();
  if (owner == 0) {
    close(done[1]);  // so that reading ends if the test fails
    SharedBuffers buffers;
    void* const data = buffers.allocate(500'000);
    std::memset(data, 7, 500'000);
    const Location shown = describe(data, 500'000, buffers);
    char end;
    const bool told = write(ready[1], &shown, sizeof shown) == sizeof shown && read(done[0], &end, 1) == 1;
    _exit(told ? 0 : 1);
  }
  SharedBuffers own;
  void* kept[] = {own.allocate(500'000), own.allocate(1'000'000)};
  for (void* each : kept) own.release(each);
  CHECK_EQUAL(start_time_of(0), 0u);  // shows the sanitizer the types that are met where `/proc` cannot be read
  Location shown;
  CHECK_EQUAL(read(ready[0], &shown, sizeof shown), static_cast<ssize_t>(sizeof shown));
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  rlimit low = before;
  low.rlim_cur = 100;
  setrlimit(RLIMIT_NOFILE, &low);
  std::vector<Descriptor> taken;
  while (taken.empty() || taken.back()) taken.emplace_back(open("/dev/null", O_RDONLY | O_CLOEXEC));
  PeerBuffers peer(own);
  const std::byte* const theirs = peer.map(owner, 0, shown);
  CHECK(theirs[0] == std::byte{7} && theirs[499'999] == std::byte{7});
  CHECK_EQUAL(own.released(), 2u);
  taken.clear();
  setrlimit(RLIMIT_NOFILE, &before);
  CHECK_EQUAL(write(done[1], "", 1), 1);
  int status = -1;
  waitpid(owner, &status, 0);
  CHECK_EQUAL(status, 0);
  for (const int fd : {ready[0], ready[1], done[0], done[1]}) close(fd);
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
        held.push_back(bytes_at(buffers.allocate(1 + random() % 200'000)));
        *held.back() = static_cast<std::byte>(seed);
        if (random() % 10 == 0) buffers.detach(held.back());
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
  what_is_detached_has_its_content_at_its_place_in_another_segment();
  small_buffers_share_segments_and_do_not_overlap();
  no_more_than_so_many_segments_are_kept_the_latest_ones();
  // Before the next two: the sanitizer needs a descriptor to check a type, here Failure's, that it has not seen yet.
  what_is_no_buffer_is_refused();
  a_peers_buffer_is_mapped_once_kept_ones_are_given_back();
  a_process_without_descriptors_left_uses_those_of_the_buffers_that_are_kept();
  the_limit_of_descriptors_is_raised_and_never_lowered();
  a_peer_unmaps_what_was_given_back_and_nothing_else();
  threads_may_share_them();
  return report();
}
