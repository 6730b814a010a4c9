// A message, and the frames with which two mailboxes move it.
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
  const int peer;  // -1 for a receive: from any rank
  const int tag;
  std::byte* data;  // only read for a send
  size_t bytes;
  int sender = -1;      // for a receive, valid after `done`
  double finished = 0;  // when it was done, in seconds of the monotonic clock
  std::atomic<bool> done{false};
  std::exception_ptr failure;  // read after `done`
};

// The beginning of every frame on a link between two mailboxes.
struct Header {
  enum class Kind : uint32_t {
    eager,      // a message; its bytes follow
    announced,  // a message; the sender keeps its bytes until they are wanted
    offered,    // a message; the receiver reads its bytes in place
    wanted,     // answers `announced`: send the bytes
    content,    // the next bytes of a wanted message; they follow
    taken,      // answers `announced` and `offered`: the bytes are not needed any more
    credit,     // carries `returned`
    leaving,    // the sender's last frame, except for answers
    heard,      // answers `leaving`: all data of complete sends was received; the last frame
  };
  Kind kind = Kind::eager;
  int32_t tag = 0;
  uint64_t bytes = 0;     // of the message; of content, those that follow
  uint64_t number = 0;    // of an announced or offered message, and of its answers
  uint64_t returned = 0;  // credit in bytes: the receiver has consumed as many eager bytes
  Notice offered = {};    // of an offered message only, as an input
  uint64_t is_copy = 0;   // of an offered message only: it is in a copy, and its send is complete
};

static_assert(std::is_trivially_copyable_v<Header>);

// The bytes of a header that are written: only those that its kind needs.
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
