// Memory that several processes map, without a name in any file system.
//
// A segment is a memfd: peers on the host open it through /proc/PID/fd/N, which needs the same user and the same
// process namespace, but no room in /dev/shm. It is gone with the last process that has it, however that ends. Within
// a process a segment is mapped once: ranks that are threads have it at the same address.
//
// A descriptor's number does not say what is behind it: its process may have closed it and opened a file since, or
// have ended and left its number to another. So a segment has an identity, which is told with the descriptor. Who
// attaches checks inode and size before it opens anything, then the seal (only a memfd can be kept from shrinking, and
// what cannot shrink raises no SIGBUS), then a random cookie in the page after the data, and maps nothing else.
//
// Who created a segment owns it, and alone may `revoke` and `give_back`. Both clear the cookie: nobody attaches the
// segment from then on, and who has it mapped finds it void, and unmaps it when it likes. Revoked pages stay for as
// long as somebody has them mapped; pages given back are gone at once, so nobody may be using them.
//
// A process that is forked off has the segments that its parent created as private memory: what it writes stays with
// it. A page that it has not written to yet still shows what the parent writes there.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "transport/descriptor.h"

namespace shoal {

// What tells a segment from any other file.
struct SegmentIdentity {
  uint64_t inode = 0;
  uint64_t bytes = 0;   // of the data
  uint64_t cookie = 0;  // random, never 0, written after the data
};

class Segment {
 public:
  // None.
  Segment() = default;

  // A new one of `bytes` zeros; pages are taken when they are first touched.
  static Segment create(size_t bytes);

  // The one that process `pid`, of the rank that failures name, told to have as its descriptor `fd`. Throws Failure:
  // peer_lost, if the process ended; denied, if the system's rules forbid it; system, if the descriptor is not, or no
  // longer, that segment's.
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

  // Nobody attaches it any more.
  void revoke();

  // Gives the memory of a part back to the system, if that can make holes in files: true. If it is touched again it
  // holds zeros.
  bool give_back(size_t offset, size_t bytes);
  // All of it, which also revokes. Where there are no holes, the memory goes with the last mapping.
  void give_back();

  // How much memory it takes now, in bytes.
  size_t resident() const;

  // Puts a copy of the content, in memory that no other process has yet, at the same address. What the others have
  // mapped is revoked.
  void detach();
  // The same of a part alone, in whole pages. It is a segment of its own then; what the others have mapped stays.
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
  uint64_t* cookie_ = nullptr;         // where it is mapped; null of a part that was detached
  Descriptor descriptor_;
};

}  // namespace shoal
