// A message, and what the mailboxes of two ranks say to each other to move it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <type_traits>

#include "transport/board.h"

namespace shoal {

// A send or a receive that was posted.
struct Message {
  const int peer;  // -1 of a receive: from anyone
  const int tag;
  std::byte* data;  // of a send it is only read
  size_t bytes;
  int sender = -1;      // of a receive, read after `done`
  double finished = 0;  // when it was done, in seconds of the monotonic clock
  std::atomic<bool> done{false};
  std::exception_ptr failure;  // read after `done`
};

// What every frame on a link between two mailboxes begins with.
struct Header {
  enum class Kind : uint32_t {
    eager,      // a message; its bytes follow
    announced,  // a message; the sender keeps its bytes until they are wanted
    offered,    // a message; the receiver reads its bytes from where they lie
    wanted,     // answers `announced`: send the bytes
    content,    // some bytes of a message that was wanted, the next ones; they follow
    taken,      // answers `announced` and `offered`: nobody needs the bytes any more
    credit,     // carries `returned`
    leaving,    // the sender's last frame but for answers
    heard,      // answers `leaving`: whatever was complete has been taken in; the last frame
  };
  Kind kind = Kind::eager;
  int32_t tag = 0;
  uint64_t bytes = 0;     // of the message; of content, those that follow
  uint64_t number = 0;    // of an announced or offered message, and in what answers it
  uint64_t returned = 0;  // credit, in bytes: the receiver has done with so many eager ones
  Notice offered = {};    // of an offered message only, as an input
  uint64_t is_copy = 0;   // the same: it lies in a copy, and its send is complete
};

static_assert(std::is_trivially_copyable_v<Header>);

// How much of a header is written: no more than its kind needs.
constexpr size_t short_header = offsetof(Header, offered);
constexpr size_t written_size(const Header& header) {
  return header.kind == Header::Kind::offered ? sizeof(Header) : short_header;
}

// How many bytes follow a header.
constexpr size_t bytes_after(const Header& header) {
  const bool has_bytes = header.kind == Header::Kind::eager || header.kind == Header::Kind::content;
  return has_bytes ? header.bytes : 0;
}

}  // namespace shoal
