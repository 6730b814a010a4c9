#include "transport/segment.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <map>
#include <mutex>
#include <string>

#include "common/error.h"
#include "transport/process.h"

namespace shoal {

namespace {

constexpr size_t grain = 4096;

// The data is followed by the cookie.
size_t cookie_offset(size_t bytes) { return (bytes + grain - 1) / grain * grain; }
size_t file_bytes(size_t bytes) { return cookie_offset(bytes) + grain; }

uint64_t random_cookie() {
  uint64_t cookie = 0;
  while (cookie == 0) {
    if (getrandom(&cookie, sizeof cookie, 0) < 0) throw system_failure("no random number (getrandom)", errno);
  }
  return cookie;
}

std::atomic_ref<uint64_t> shown(uint64_t& cookie) { return std::atomic_ref<uint64_t>(cookie); }

struct stat status_of(const Descriptor& descriptor) {
  struct stat status {};
  if (fstat(descriptor.number(), &status) != 0) throw system_failure("shared memory cannot be looked at", errno);
  return status;
}

// Maps at `address`, replacing the present mapping, or at any address.
std::byte* map_pages(const Descriptor& descriptor, size_t bytes, std::byte* address = nullptr) {
  const int flags = MAP_SHARED | (address != nullptr ? MAP_FIXED : 0);
  void* data = mmap(address, bytes, PROT_READ | PROT_WRITE, flags, descriptor.number(), 0);
  if (data == MAP_FAILED) {
    throw system_failure("shared memory of " + std::to_string(bytes) + " bytes cannot be mapped", errno);
  }
  // Fewer page faults where the system allows it; refused elsewhere, which costs nothing.
  madvise(data, bytes, MADV_HUGEPAGE);
  return static_cast<std::byte*>(data);
}

// Why a descriptor of the process cannot be opened.
Failure unopened(pid_t pid, int rank, int error) {
  const std::string who = "rank " + std::to_string(rank);
  if (has_ended(pid)) return Failure(Code::peer_lost, rank, "the process of " + who + " ended");
  const bool is_there = access(("/proc/" + std::to_string(pid)).c_str(), F_OK) == 0;
  if (error == ENOENT && is_there) return Failure(Code::system, rank, who + " gave back memory that it had shown");
  const Failure failure = system_failure("the memory of " + who + " cannot be opened", error, rank);
  const bool is_denied = error == EACCES || error == EPERM || error == ENOENT;
  return is_denied ? Failure(Code::denied, rank, failure.what(), error) : failure;
}

Failure another(int rank, const std::string& what) {
  const std::string who = "rank " + std::to_string(rank);
  return Failure(Code::system, rank, who + " gave back memory that it had shown: its descriptor has " + what + " now");
}

// Opens a segment of another process, and nothing else. It is first opened as a path only, which does not touch the
// file: no FIFO blocks, no device reacts.
Descriptor open_pages(pid_t pid, int fd, const SegmentIdentity& identity, int rank) {
  const std::string theirs = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  const Descriptor path(open(theirs.c_str(), O_PATH | O_CLOEXEC));
  if (!path) throw unopened(pid, rank, errno);
  const struct stat status = status_of(path);
  if (!S_ISREG(status.st_mode)) throw another(rank, "no memory");
  if (status.st_ino != identity.inode) throw another(rank, "another file");
  if (static_cast<uint64_t>(status.st_size) != file_bytes(identity.bytes)) throw another(rank, "another size");
  const std::string own = "/proc/self/fd/" + std::to_string(path.number());
  Descriptor pages(open(own.c_str(), O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK));
  if (!pages) throw unopened(pid, rank, errno);
  const int seals = fcntl(pages.number(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) throw another(rank, "a file that may shrink");
  uint64_t cookie = 0;
  const auto offset = static_cast<off_t>(cookie_offset(identity.bytes));
  const ssize_t got = pread(pages.number(), &cookie, sizeof cookie, offset);
  if (got != sizeof cookie || cookie != identity.cookie) throw another(rank, "other content");
  return pages;
}

}  // namespace

class Segment::Mapping {
 public:
  Mapping(const Descriptor& descriptor, size_t bytes)
      : data_(map_pages(descriptor, file_bytes(bytes))), bytes_(bytes) {}
  ~Mapping() { munmap(data_, file_bytes(bytes_)); }
  Mapping(const Mapping&) = delete;

  std::byte* data() const { return data_; }
  uint64_t* cookie() const { return reinterpret_cast<uint64_t*>(data_ + cookie_offset(bytes_)); }

 private:
  std::byte* const data_;
  const size_t bytes_;
};

// The segments that this process created and has not destroyed. Its own ranks attach to the same mapping, and forked
// processes must not write to them. There is one for the process, as for descriptors and forks.
class Segment::Owned {
 public:
  static Owned& instance() {
    static auto* owned = new Owned;  // never destroyed: segments may be, after everything else
    return *owned;
  }

  void add(const Segment& segment) {
    const bool is_part = segment.cookie_ == nullptr;
    const size_t mapped_bytes = is_part ? segment.bytes() : file_bytes(segment.bytes());
    std::lock_guard lock(mutex_);
    segments_[segment.identity_.cookie] = {segment.mapping_, segment.data_,  mapped_bytes,
                                           segment.cookie_,  segment.descriptor()};
  }

  void remove(const Segment& segment) {
    std::lock_guard lock(mutex_);
    segments_.erase(segment.identity_.cookie);
  }

  // Sets `segment` to the one with the identity; false if this process did not create it.
  bool find(const SegmentIdentity& identity, Segment& segment) {
    std::lock_guard lock(mutex_);
    const auto found = segments_.find(identity.cookie);
    if (found == segments_.end()) return false;
    segment.mapping_ = found->second.mapping.lock();
    segment.data_ = found->second.data;
    segment.cookie_ = found->second.cookie;
    segment.identity_ = identity;
    return segment.mapping_ != nullptr;
  }

 private:
  struct Entry {
    std::weak_ptr<Mapping> mapping;
    std::byte* data;
    size_t mapped_bytes;
    uint64_t* cookie;  // null: a part of another segment, mapped in its place
    int descriptor;
    bool is_inherited = false;  // it belongs to the parent; here it is private already
  };

  // The lock is held during the fork, so that other threads do not change the data that the child reads.
  Owned() {
    pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                   [] { instance().leave_to_parent(); });
  }

  // In the child, where only system calls are safe: its later writes go to copies of the pages. Parts come after the
  // segments over which they are mapped.
  void leave_to_parent() {
    for (const bool is_part : {false, true}) {
      for (auto& [cookie, entry] : segments_) {
        if (entry.is_inherited || (entry.cookie == nullptr) != is_part) continue;
        constexpr int flags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
        if (mmap(entry.data, entry.mapped_bytes, PROT_READ | PROT_WRITE, flags, entry.descriptor, 0) == MAP_FAILED) {
          mprotect(entry.data, entry.mapped_bytes, PROT_READ);  // a crash of the child, not a change elsewhere
        }
        entry.is_inherited = true;
      }
    }
    mutex_.unlock();
  }

  std::mutex mutex_;
  std::map<uint64_t, Entry> segments_;  // by cookie
};

Segment::Pages Segment::make_pages(size_t bytes) {
  const std::string size = std::to_string(bytes) + " bytes";
  Pages pages;
  pages.descriptor = Descriptor(memfd_create("shoal", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const int fd = pages.descriptor.number();
  if (fd < 0) throw system_failure("no memory to share, of " + size + " (memfd_create)", errno);
  errno = EFBIG;
  if (bytes > PTRDIFF_MAX / 2 || ftruncate(fd, static_cast<off_t>(file_bytes(bytes))) != 0) {
    throw system_failure("no memory to share, of " + size + " (ftruncate)", errno);
  }
  if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    throw system_failure("shared memory cannot be sealed", errno);
  }
  pages.identity = {status_of(pages.descriptor).st_ino, bytes, random_cookie()};
  return pages;
}

Segment Segment::create(size_t bytes) {
  Pages pages = make_pages(bytes);
  Segment segment;
  segment.mapping_ = std::make_shared<Mapping>(pages.descriptor, bytes);
  segment.data_ = segment.mapping_->data();
  segment.cookie_ = segment.mapping_->cookie();
  segment.take(std::move(pages));
  shown(*segment.cookie_).store(segment.identity_.cookie, std::memory_order_relaxed);
  return segment;
}

void Segment::take(Pages pages) {
  descriptor_ = std::move(pages.descriptor);
  identity_ = pages.identity;
  Owned::instance().add(*this);
}

Segment Segment::attach(pid_t pid, int fd, const SegmentIdentity& identity, int rank) {
  Segment segment;
  if (pid == getpid() && Owned::instance().find(identity, segment)) return segment;
  const Descriptor pages = open_pages(pid, fd, identity, rank);
  segment.mapping_ = std::make_shared<Mapping>(pages, identity.bytes);
  segment.data_ = segment.mapping_->data();
  segment.cookie_ = segment.mapping_->cookie();
  segment.identity_ = identity;
  return segment;
}

Segment::~Segment() {
  if (descriptor_) Owned::instance().remove(*this);
}

bool Segment::is_void() const {
  return cookie_ != nullptr && shown(*cookie_).load(std::memory_order_acquire) != identity_.cookie;
}

void Segment::revoke() {
  constexpr uint64_t none = 0;
  const auto offset = static_cast<off_t>(cookie_offset(bytes()));
  if (pwrite(descriptor(), &none, sizeof none, offset) != sizeof none) {
    throw system_failure("shared memory cannot be revoked", errno);
  }
}

bool Segment::give_back(size_t offset, size_t bytes) {
  constexpr int hole = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
  return fallocate(descriptor(), hole, static_cast<off_t>(offset), static_cast<off_t>(bytes)) == 0;
}

void Segment::give_back() {
  if (!give_back(0, file_bytes(bytes()))) revoke();
}

size_t Segment::resident() const {
  constexpr size_t unit = 512;  // of st_blocks
  return static_cast<size_t>(status_of(descriptor_).st_blocks) * unit;
}

Segment::Pages Segment::copy_pages(const std::byte* from, size_t bytes) {
  Pages pages = make_pages(bytes);
  const auto write = [&](const void* data, size_t count, size_t offset) {
    for (size_t done = 0; done < count;) {  // faster than a mapping, with its page faults
      const void* rest = static_cast<const std::byte*>(data) + done;
      const ssize_t written = pwrite(pages.descriptor.number(), rest, count - done, static_cast<off_t>(offset + done));
      if (written <= 0) throw system_failure("shared memory cannot be copied", errno);
      done += static_cast<size_t>(written);
    }
  };
  write(from, bytes, 0);
  write(&pages.identity.cookie, sizeof pages.identity.cookie, cookie_offset(bytes));
  return pages;
}

void Segment::detach() {
  Pages fresh = copy_pages(data_, bytes());
  revoke();
  map_pages(fresh.descriptor, file_bytes(bytes()), data_);
  Owned::instance().remove(*this);
  take(std::move(fresh));
}

Segment Segment::detach(size_t offset, size_t bytes) {
  Pages fresh = copy_pages(data_ + offset, bytes);
  Segment part;
  part.data_ = map_pages(fresh.descriptor, bytes, data_ + offset);
  part.mapping_ = mapping_;
  part.take(std::move(fresh));
  return part;
}

}  // namespace shoal
