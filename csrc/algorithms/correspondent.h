// The state of a mailbox towards one peer. The mailbox's lock guards all of it, except the bytes of the first reading
// while `is_being_read`.
#pragma once

#include <deque>
#include <list>
#include <map>
#include <memory>
#include <vector>

#include "algorithms/message.h"
#include "transport/link.h"

namespace shoal {

// A frame to be written to a link.
struct Frame {
  Header header;
  const std::byte* bytes = nullptr;
  std::shared_ptr<Message> message = {};  // an eager message, which is done when all is written
  size_t written = 0;                     // of header and bytes
  std::vector<std::byte> kept = {};       // the bytes of a frame whose message failed during the write

  size_t size() const { return written_size(header) + bytes_after(header); }
};

// A message that arrived, or is arriving, before a receive asked for it. It has its bytes if it was eager, or if its
// sender leaves; otherwise the sender keeps them, and only the header is here.
struct Early {
  int peer;
  Header header;
  std::unique_ptr<std::byte[]> bytes = {};
  bool is_complete = false;                 // all bytes are here
  std::shared_ptr<Message> wanted_by = {};  // the receive that asked for it while its bytes arrive
};

// A message on its way to its destination: a receive, or the list of early messages.
struct Arrival {
  Header header;
  std::shared_ptr<Message> message = {};
  std::list<Early>::iterator early = {};     // if there is no message
  std::unique_ptr<std::byte[]> source = {};  // the bytes that are here already, such as those of an early message
  size_t done = 0;

  std::byte* to() const { return message ? message->data : early->bytes.get(); }
};

// The frame that is being read from a link.
struct Incoming {
  Header header;
  size_t header_bytes = 0;
  bool is_begun = false;
  std::byte* to = nullptr;  // where the bytes go; null: they are dropped
  size_t received = 0;
  std::shared_ptr<Message> message;  // of an eager message
  std::list<Early>::iterator early;  // of an eager message that no receive has asked for yet
  bool is_early = false;
};

struct Correspondent {
  // The most bytes of eager messages that are not received yet.
  static constexpr size_t all_credit = 4 * 1024 * 1024;

  Link* link = nullptr;  // null while there is none
  bool is_requested = false;
  std::exception_ptr failure;  // the link ended at `failed_at`, and it is not known yet whether the peer leaves
  double failed_at = 0;

  // Outward: the frames in order, then the bytes that the peer wants, by the number of the offer.
  std::deque<Frame> frames;
  std::deque<uint64_t> contents;
  size_t credit = all_credit;

  // Inward.
  Incoming incoming;
  size_t owed = 0;                       // credit to be returned
  std::map<uint64_t, Arrival> awaited;   // by number: wanted messages that are not complete here
  std::list<Arrival> readings;           // offered messages to be read; a thread reads the first one
  bool is_being_read = false;

  // The peer leaves: it announces that it will leave (1), says `leaving` (2), gets the answer `heard` (3), and is gone
  // (4).
  bool is_expected = false;   // 1, from the Watch, until 3 or 4
  bool is_leaving = false;    // 2: what it has kept is void
  bool is_answered = false;   // 3 is among the frames, or written
  bool is_closed = false;     // 3 is written, or the link has ended: the link is not used any more
  bool is_gone = false;       // 4, from the Watch
  // This rank leaves:
  bool is_told = false;       // `leaving` is among the frames, or written
  bool has_heard = false;     // the peer has answered
};

}  // namespace shoal
