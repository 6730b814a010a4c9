// Memory that several processes map, without a name in any file system.
//
// A segment is a memfd: peers on the host open it through /proc/PID/fd/N, which needs the same user and the
// same process namespace, but no room in /dev/shm. It is gone with the last process that has it, however that
// ends. Within a process a segment is mapped once: ranks that are threads have it at the same address.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <utility>

#include "transport/descriptor.h"

namespace shoal {

class Segment {
 public:
  // None.
  Segment() = default;

  // A new one of `bytes` zeros; pages are taken when they are first touched.
  static Segment create(size_t bytes);

  // The one that process `pid`, of the rank that failures name, has as its descriptor `fd`.
  static Segment attach(pid_t pid, int fd, size_t bytes, int rank);

  Segment(Segment&& other) noexcept { swap(other); }
  Segment& operator=(Segment&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Segment();

  // Puts a copy of the content, in memory that no other process has, at the same address. Of one that was
  // created.
  void detach();

  std::byte* data() const { return data_; }  // null if there is none
  size_t bytes() const { return bytes_; }

  // The descriptor that peers open; -1 for one that was attached.
  int descriptor() const { return descriptor_.number(); }

 private:
  class Mapping;
  class OwnMappings;

  void hold(std::shared_ptr<Mapping> mapping);
  void swap(Segment& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(mapping_, other.mapping_);
    std::swap(descriptor_, other.descriptor_);
  }

  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  std::shared_ptr<Mapping> mapping_;  // of `data_`
  Descriptor descriptor_;
};

}  // namespace shoal
