// Memory that several processes map, without a name in any file system.
//
// A segment is a memfd: peers on the host open it through /proc/PID/fd/N, which needs the same user and the same
// process namespace, but no room in /dev/shm. It is gone with the last process that has it, however that ends.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <utility>

namespace shoal {

class Segment {
 public:
  Segment() = default;

  // A new one of `bytes` zeros; pages are taken when they are first touched.
  static Segment create(size_t bytes);

  // The one that process `pid` has as its descriptor `fd`. In the process itself it is mapped once more.
  static Segment attach(pid_t pid, int fd, size_t bytes);

  Segment(Segment&& other) noexcept { swap(other); }
  Segment& operator=(Segment&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Segment();

  // Puts a copy of the content, in memory that nobody else has, at the same address.
  void detach();

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

  // The descriptor that peers open; -1 for one that was attached.
  int descriptor() const { return descriptor_; }

 private:
  void map(int descriptor, size_t bytes);
  void swap(Segment& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(descriptor_, other.descriptor_);
  }

  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  int descriptor_ = -1;
};

}  // namespace shoal
