#include "transport/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "common/error.h"

namespace shoal {

Segment Segment::create(size_t bytes) {
  Segment segment;
  segment.descriptor_ = memfd_create("shoal", MFD_CLOEXEC);
  if (segment.descriptor_ < 0) throw system_failure("no memory to share (memfd_create)", errno);
  if (ftruncate(segment.descriptor_, static_cast<off_t>(bytes)) != 0) {
    throw system_failure("no memory to share (ftruncate to " + std::to_string(bytes) + " bytes)", errno);
  }
  segment.map(segment.descriptor_, bytes);
  return segment;
}

Segment Segment::attach(pid_t pid, int fd, size_t bytes) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  const int descriptor = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (descriptor < 0) throw system_failure("the memory of process " + std::to_string(pid) + " cannot be opened", errno);
  Segment segment;
  try {
    segment.map(descriptor, bytes);
  } catch (...) {
    close(descriptor);
    throw;
  }
  close(descriptor);
  return segment;
}

Segment::~Segment() {
  if (data_ != nullptr) munmap(data_, bytes_);
  if (descriptor_ >= 0) close(descriptor_);
}

void Segment::detach() {
  Segment fresh = create(bytes_);
  std::memcpy(fresh.data_, data_, bytes_);
  void* moved = mmap(data_, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fresh.descriptor_, 0);
  if (moved == MAP_FAILED) throw system_failure("shared memory cannot be mapped", errno);
  std::swap(descriptor_, fresh.descriptor_);
}

void Segment::map(int descriptor, size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (data == MAP_FAILED) throw system_failure("shared memory cannot be mapped", errno);
  data_ = static_cast<std::byte*>(data);
  bytes_ = bytes;
  // Fewer page faults where the system allows it; refused elsewhere, which costs nothing.
  madvise(data_, bytes_, MADV_HUGEPAGE);
}

}  // namespace shoal
