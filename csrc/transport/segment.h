// Memory that several processes map, without a name in any file system.
//
// A segment is a memfd: peers on the host open it through /proc/PID/fd/N, which needs the same user and the same
// process namespace, but no room in /dev/shm. It ends with the last process that has it, however that process ends.
// Within a process a segment is mapped once: ranks that are threads have it at the same address.
//
// A descriptor's number does not identify a segment: its process may have closed it and opened a file, or have ended,
// and another process may have its number. So a segment has an identity, which is sent with the descriptor. A process
// that attaches checks inode and size before it opens anything, then the seal (only a memfd can be sealed against
// shrinking, and without shrinking there is no SIGBUS), then a random cookie in the page after the data, and maps
// nothing else.
//
// The process that created a segment owns it, and only it may `revoke` and `give_back`. Both clear the cookie: no
// process can attach the segment from then on, and processes that have it mapped find it void, and unmap it at any
// later time. Revoked pages stay as long as a process has them mapped; pages given back are gone at once, so no process
// may be using them.
//
// A forked process has the segments of its parent as private memory: its writes stay private. A page that it has not
// written to yet still shows what the parent writes there.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "transport/descriptor.h"

namespace shoal {

// The identity of a segment, which no other file has.
struct SegmentIdentity {
  uint64_t inode = 0;
  uint64_t bytes = 0;   // of the data
  uint64_t cookie = 0;  // random, never 0, written after the data
};

class Segment {
 public:
  // No segment.
  Segment() = default;

  // A new one of `bytes` zeros; pages are allocated at the first touch.
  static Segment create(size_t bytes);

  // Attaches the segment that process `pid` has as its descriptor `fd`; failures name `rank`. Throws Failure: peer_lost
  // if the process ended; denied if the system's rules forbid it; system if the descriptor does not belong to that
  // segment, or not any more.
  static Segment attach(pid_t pid, int fd, const SegmentIdentity& identity, int rank);

  Segment(Segment&& other) noexcept { swap(other); }
  Segment& operator=(Segment&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Segment();

  std::byte* data() const { return data_; }  // null if there is none
  size_t bytes() const { return identity_.bytes; }
  const SegmentIdentity& identity() const { return identity_; }

  // The descriptor that peers open; -1 for one that was attached.
  int descriptor() const { return descriptor_.number(); }

  // Whether the owner gave it back, or revoked it.
  bool is_void() const;

  // --- for the owner ---

  // From now on no process can attach it.
  void revoke();

  // Gives the memory of a part back to the system; returns false if the system cannot make holes in files. The part
  // then holds zeros.
  bool give_back(size_t offset, size_t bytes);
  // Gives back the whole segment, and revokes it. If the system makes no holes, the memory is freed with the last
  // mapping.
  void give_back();

  // How much memory it takes now, in bytes.
  size_t resident() const;

  // Moves the content to new memory, which no other process has, at the same address. The old memory, which others have
  // mapped, is revoked.
  void detach();
  // Does this for a part, in whole pages. The part becomes a separate segment; the mappings of other processes stay.
  Segment detach(size_t offset, size_t bytes);

 private:
  class Mapping;
  class Owned;

  // A memfd that has this identity.
  struct Pages {
    Descriptor descriptor;
    SegmentIdentity identity;
  };
  static Pages make_pages(size_t bytes);
  static Pages copy_pages(const std::byte* from, size_t bytes);

  // Makes them this segment's own.
  void take(Pages pages);

  void swap(Segment& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(identity_, other.identity_);
    std::swap(mapping_, other.mapping_);
    std::swap(cookie_, other.cookie_);
    std::swap(descriptor_, other.descriptor_);
  }

  std::byte* data_ = nullptr;
  SegmentIdentity identity_;
  std::shared_ptr<Mapping> mapping_;   // that `data_` lies in
  uint64_t* cookie_ = nullptr;         // where it is mapped; null for a detached part
  Descriptor descriptor_;
};

}  // namespace shoal
