// Segments, and files that are refused as segments.
#include "transport/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "tests/check.h"
#include "tests/network_ranks.h"

using namespace shoal;
using namespace shoal::testing;

namespace {

constexpr size_t bytes = 10'000;
constexpr size_t in_file = 4 * 4096;  // the data's three pages, and the cookie's

Code code_of_attaching(pid_t pid, int descriptor, const SegmentIdentity& identity) {
  try {
    Segment::attach(pid, descriptor, identity, 7);
  } catch (const Failure& failure) {
    CHECK_EQUAL(failure.rank, 7);
    CHECK(std::string(failure.what()).find("rank 7") != std::string::npos);
    return failure.code;
  }
  return Code::ok;
}

struct stat status_of(int descriptor) {
  struct stat status {};
  CHECK_EQUAL(fstat(descriptor, &status), 0);
  return status;
}

std::vector<char> content_of(int descriptor) {
  std::vector<char> content(static_cast<size_t>(status_of(descriptor).st_size));
  CHECK_EQUAL(pread(descriptor, content.data(), content.size(), 0), content.size());
  return content;
}

// A file without a name, with this content.
int file_of(const std::vector<char>& content) {
  char name[] = "/tmp/segment_test_XXXXXX";
  const int descriptor = mkstemp(name);
  CHECK(descriptor >= 0);
  unlink(name);
  CHECK_EQUAL(write(descriptor, content.data(), content.size()), content.size());
  return descriptor;
}

// --- tests in separate processes, before this process has threads ---

void another_process_has_the_same_memory_until_it_is_detached() {
  Segment segment = Segment::create(100'000);
  const pid_t owner = getpid();
  SharedWithChildren<std::atomic<int>> stage;
  Child child([&] {
    Segment theirs = Segment::attach(owner, segment.descriptor(), segment.identity(), 0);
    theirs.data()[99'999] = std::byte{42};
    stage->store(theirs.is_void() ? 9 : 1);
    if (!comes_true([&] { return stage->load() == 2; })) throw Failure(Code::timeout, -1, "not detached");
    theirs.data()[0] = std::byte{13};
    stage->store(theirs.is_void() ? 3 : 9);
  });
  CHECK(comes_true([&] { return stage->load() == 1; }));
  CHECK(segment.data()[99'999] == std::byte{42});
  segment.detach();
  CHECK(segment.data()[99'999] == std::byte{42});
  stage->store(2);
  CHECK(comes_true([&] { return stage->load() == 3; }));
  CHECK(segment.data()[0] == std::byte{0});
}

void a_part_that_is_detached_leaves_the_rest_as_it_was() {
  Segment segment = Segment::create(4 * 4096);
  const SegmentIdentity before = segment.identity();
  std::memset(segment.data(), 1, 4 * 4096);
  const pid_t owner = getpid();
  SharedWithChildren<std::atomic<int>> stage;
  Child child([&] {
    Segment theirs = Segment::attach(owner, segment.descriptor(), before, 0);
    stage->store(1);
    if (!comes_true([&] { return stage->load() == 2; })) throw Failure(Code::timeout, -1, "not detached");
    std::memset(theirs.data(), 2, 4 * 4096);
    stage->store(theirs.is_void() ? 9 : 3);
  });
  CHECK(comes_true([&] { return stage->load() == 1; }));
  Segment part = segment.detach(4096, 2 * 4096);
  CHECK_EQUAL(part.data(), segment.data() + 4096);
  stage->store(2);
  CHECK(comes_true([&] { return stage->load() == 3; }));
  CHECK(segment.data()[0] == std::byte{2} && segment.data()[3 * 4096] == std::byte{2});
  CHECK(segment.data()[4096] == std::byte{1} && segment.data()[3 * 4096 - 1] == std::byte{1});
  Segment same = Segment::attach(getpid(), part.descriptor(), part.identity(), 0);
  CHECK_EQUAL(same.data(), part.data());
}

void what_a_forked_process_writes_stays_with_it() {
  Segment segment = Segment::create(4 * 4096);
  std::memset(segment.data(), 1, 4 * 4096);
  const Segment part = segment.detach(4096, 4096);
  part.data()[0] = std::byte{3};
  SharedWithChildren<std::atomic<int>> wrong;
  {
    Child child([&] {
      std::byte* const data = segment.data();
      if (data[0] != std::byte{1} || data[4096] != std::byte{3}) wrong->fetch_add(1);
      std::memset(data, 2, 4 * 4096);
      const Child grandchild([&] {
        for (size_t at = 0; at < 4 * 4096; at += 512) wrong->fetch_add(data[at] != std::byte{2});
        data[0] = std::byte{4};
        wrong->fetch_add(1000);
      });
      if (!comes_true([&] { return wrong->load() >= 1000; })) throw Failure(Code::timeout, -1, "no grandchild");
      wrong->fetch_add(data[0] != std::byte{2});
      wrong->fetch_add(1000);
    });
    CHECK(comes_true([&] { return wrong->load() >= 2000; }));
  }
  CHECK_EQUAL(wrong->load(), 2000);
  for (size_t at = 1; at < 4 * 4096; at += 512) CHECK(segment.data()[at] == std::byte{1});
  CHECK(segment.data()[0] == std::byte{1} && part.data()[0] == std::byte{3});
}

void who_may_not_and_who_is_gone_are_told_apart() {
  const Segment segment = Segment::create(bytes);
  const pid_t owner = getpid();
  SharedWithChildren<std::atomic<int>> found;
  found->store(-1);
  prctl(PR_SET_DUMPABLE, 0);  // this keeps the user's other processes out, but not root
  {
    Child child([&] {
      if (geteuid() == 0 && setresuid(65'534, 65'534, 65'534) != 0) throw Failure(Code::system, -1, "setresuid");
      found->store(static_cast<int>(code_of_attaching(owner, segment.descriptor(), segment.identity())));
    });
    CHECK(comes_true([&] { return found->load() >= 0; }));
  }
  prctl(PR_SET_DUMPABLE, 1);
  CHECK_EQUAL(found->load(), static_cast<int>(Code::denied));
  pid_t gone;
  {
    const Child child([] {});
    gone = child.pid();
    siginfo_t information;
    waitid(P_PID, static_cast<id_t>(gone), &information, WEXITED | WNOWAIT);
    CHECK_EQUAL(code_of_attaching(gone, segment.descriptor(), segment.identity()), Code::peer_lost);  // a zombie
  }
  CHECK_EQUAL(code_of_attaching(gone, segment.descriptor(), segment.identity()), Code::peer_lost);
}

// --- other files ---

void a_segment_is_mapped_once_in_a_process() {
  Segment own = Segment::create(bytes);
  const SegmentIdentity identity = own.identity();
  const int descriptor = own.descriptor();
  Segment attached = Segment::attach(getpid(), descriptor, identity, 0);
  CHECK_EQUAL(attached.data(), own.data());
  CHECK_EQUAL(attached.bytes(), bytes);
  attached.data()[5] = std::byte{1};
  own = Segment();
  CHECK(attached.data()[5] == std::byte{1});  // it exists as long as a process has it
  CHECK_EQUAL(code_of_attaching(getpid(), descriptor, identity), Code::system);
}

void what_was_revoked_or_given_back_is_void_and_attached_by_nobody() {
  for (const bool is_given_back : {false, true}) {
    Segment own = Segment::create(bytes);
    std::memset(own.data(), 7, bytes);
    CHECK(own.resident() >= bytes);
    // As another process would, which does not have the mapping.
    SegmentIdentity identity = own.identity();
    Segment attached = Segment::attach(getpid(), own.descriptor(), identity, 0);
    CHECK(!attached.is_void());
    is_given_back ? own.give_back() : own.revoke();
    CHECK(attached.is_void());
    CHECK(attached.data()[0] == std::byte(is_given_back ? 0 : 7));
    const int kept = dup(own.descriptor());
    own = Segment();
    CHECK_EQUAL(code_of_attaching(getpid(), kept, identity), Code::system);
    close(kept);
  }
}

void a_part_that_is_given_back_takes_no_memory() {
  Segment own = Segment::create(4 * 4096);
  std::memset(own.data(), 7, 4 * 4096);
  const size_t before = own.resident();
  own.give_back(4096, 2 * 4096);
  CHECK_EQUAL(before - own.resident(), 2 * 4096);
  CHECK(own.data()[0] == std::byte{7} && own.data()[4096] == std::byte{0} && !own.is_void());
}

// A descriptor's number, with everything that a process may open under it after it closed the segment.
void whatever_else_has_the_descriptors_number_is_refused_and_left_alone() {
  Segment segment = Segment::create(bytes);
  std::memset(segment.data(), 7, bytes);
  const SegmentIdentity identity = segment.identity();
  const int number = segment.descriptor();
  const std::vector<char> copy = content_of(number);
  CHECK_EQUAL(copy.size(), in_file);
  const int kept = dup(number);
  segment = Segment();

  const auto is_refused = [&](int other, const SegmentIdentity& told) {
    CHECK_EQUAL(dup2(other, number), number);
    if (other != number) close(other);
    CHECK_EQUAL(code_of_attaching(getpid(), number, told), Code::system);
  };
  int pair[2];
  CHECK_EQUAL(pipe(pair), 0);  // the reading end of a pipe without writers
  is_refused(pair[0], identity);
  close(pair[1]);
  CHECK_EQUAL(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
  is_refused(pair[0], identity);
  close(pair[1]);
  is_refused(open("/dev/null", O_RDWR), identity);
  is_refused(open("/tmp", O_RDONLY | O_DIRECTORY), identity);
  is_refused(file_of({'s', 'h', 'o', 'r', 't'}), identity);
  is_refused(dup(Segment::create(bytes).descriptor()), identity);  // another segment, of the same size

  // Files that match more and more of the identity.
  SegmentIdentity told = identity;
  const int forged = file_of(copy);
  told.inode = status_of(forged).st_ino;
  is_refused(dup(forged), identity);  // another inode
  is_refused(dup(forged), told);      // no seal
  CHECK(content_of(forged) == copy);
  close(forged);
  const Segment other = Segment::create(bytes);
  told = other.identity();
  told.cookie = identity.cookie;
  is_refused(dup(other.descriptor()), told);  // another cookie
  told = identity;
  told.bytes += 4096;
  is_refused(dup(kept), told);  // the segment, of another size

  CHECK_EQUAL(dup2(kept, number), number);
  const Segment attached = Segment::attach(getpid(), number, identity, 7);
  CHECK(attached.data()[bytes - 1] == std::byte{7});
  close(kept);
  close(number);
  CHECK_EQUAL(code_of_attaching(getpid(), number, identity), Code::system);
}

void nobody_can_shorten_a_segment() {
  const Segment segment = Segment::create(bytes);
  CHECK(ftruncate(segment.descriptor(), 0) != 0);
  CHECK_EQUAL(errno, EPERM);
  CHECK_THROWS(Segment::create(SIZE_MAX), Code::system);
}

}  // namespace

int main() {
  another_process_has_the_same_memory_until_it_is_detached();
  a_part_that_is_detached_leaves_the_rest_as_it_was();
  what_a_forked_process_writes_stays_with_it();
  who_may_not_and_who_is_gone_are_told_apart();
  a_segment_is_mapped_once_in_a_process();
  what_was_revoked_or_given_back_is_void_and_attached_by_nobody();
  a_part_that_is_given_back_takes_no_memory();
  whatever_else_has_the_descriptors_number_is_refused_and_left_alone();
  nobody_can_shorten_a_segment();
  return report();
}
