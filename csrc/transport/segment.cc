#include "transport/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "common/error.h"
#include "transport/descriptor.h"

namespace shoal {

namespace {

Descriptor make_pages(size_t bytes) {
  Descriptor descriptor(memfd_create("shoal", MFD_CLOEXEC));
  if (!descriptor) throw system_failure("no memory to share (memfd_create)", errno);
  if (ftruncate(descriptor.number(), static_cast<off_t>(bytes)) != 0) {
    throw system_failure("no memory to share (ftruncate to " + std::to_string(bytes) + " bytes)", errno);
  }
  return descriptor;
}

// At `address`, in place of what is there, or at any.
std::byte* map_pages(const Descriptor& descriptor, size_t bytes, std::byte* address = nullptr) {
  const int flags = MAP_SHARED | (address != nullptr ? MAP_FIXED : 0);
  void* data = mmap(address, bytes, PROT_READ | PROT_WRITE, flags, descriptor.number(), 0);
  if (data == MAP_FAILED) throw system_failure("shared memory cannot be mapped", errno);
  // Fewer page faults where the system allows it; refused elsewhere, which costs nothing.
  madvise(data, bytes, MADV_HUGEPAGE);
  return static_cast<std::byte*>(data);
}

}  // namespace

class Segment::Mapping {
 public:
  Mapping(const Descriptor& descriptor, size_t bytes) : data_(map_pages(descriptor, bytes)), bytes_(bytes) {}
  ~Mapping() { munmap(data_, bytes_); }
  Mapping(const Mapping&) = delete;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  std::byte* const data_;
  const size_t bytes_;
};

void Segment::hold(std::shared_ptr<Mapping> mapping) {
  data_ = mapping->data();
  bytes_ = mapping->bytes();
  mapping_ = std::move(mapping);
}

// The segments that this process made, by descriptor: what its own ranks attach is the same mapping. One
// for the process, as descriptors are the process's.
class Segment::OwnMappings {
 public:
  static OwnMappings& instance() {
    static auto* mappings = new OwnMappings;  // never destroyed: segments may be, after everything else
    return *mappings;
  }

  void set(int descriptor, const std::shared_ptr<Mapping>& mapping) {
    std::lock_guard lock(mutex_);
    mappings_[descriptor] = mapping;
  }

  void remove(int descriptor) {
    std::lock_guard lock(mutex_);
    mappings_.erase(descriptor);
  }

  std::shared_ptr<Mapping> find(int descriptor) {
    std::lock_guard lock(mutex_);
    const auto found = mappings_.find(descriptor);
    return found == mappings_.end() ? nullptr : found->second.lock();
  }

 private:
  std::mutex mutex_;
  std::map<int, std::weak_ptr<Mapping>> mappings_;
};

Segment Segment::create(size_t bytes) {
  Segment segment;
  segment.descriptor_ = make_pages(bytes);
  segment.hold(std::make_shared<Mapping>(segment.descriptor_, bytes));
  OwnMappings::instance().set(segment.descriptor(), segment.mapping_);
  return segment;
}

Segment Segment::attach(pid_t pid, int fd, size_t bytes, int rank) {
  Segment segment;
  if (pid == getpid()) {
    if (auto own = OwnMappings::instance().find(fd)) {
      segment.hold(std::move(own));
      return segment;
    }
  }
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  const Descriptor descriptor(open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!descriptor) {
    throw system_failure("the memory of rank " + std::to_string(rank) + " cannot be opened", errno, rank);
  }
  segment.hold(std::make_shared<Mapping>(descriptor, bytes));
  return segment;
}

Segment::~Segment() {
  if (descriptor_) OwnMappings::instance().remove(descriptor());
}

void Segment::detach() {
  Descriptor fresh = make_pages(bytes_);
  for (size_t done = 0; done < bytes_;) {  // sooner done than through a mapping, page fault by page fault
    const ssize_t written = pwrite(fresh.number(), data_ + done, bytes_ - done, static_cast<off_t>(done));
    if (written <= 0) throw system_failure("shared memory cannot be copied", errno);
    done += static_cast<size_t>(written);
  }
  map_pages(fresh, bytes_, data_);
  OwnMappings::instance().remove(descriptor());
  descriptor_ = std::move(fresh);
  OwnMappings::instance().set(descriptor(), mapping_);
}

}  // namespace shoal
