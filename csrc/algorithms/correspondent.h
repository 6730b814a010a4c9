// What a mailbox has under way with one peer. Everything here is touched with the mailbox's lock held, but for the
// bytes of the reading in front while `is_being_read`.
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
  std::shared_ptr<Message> message = {};  // an eager one, which is done when all is written
  size_t written = 0;                     // of header and bytes
  std::vector<std::byte> kept = {};       // the bytes, of a frame whose message failed while it was being written

  size_t size() const { return written_size(header) + bytes_after(header); }
};

// A message that came, or is coming, before it was asked for. It has bytes if it was eager, or if its sender leaves;
// otherwise the sender keeps them, and what is here is the header.
struct Early {
  int peer;
  Header header;
  std::unique_ptr<std::byte[]> bytes = {};
  bool is_complete = false;                 // all bytes are here
  std::shared_ptr<Message> wanted_by = {};  // asked for since, while its bytes are coming
};

// A message on its way to where it is wanted: to a receive, or among the early ones.
struct Arrival {
  Header header;
  std::shared_ptr<Message> message = {};
  std::list<Early>::iterator early = {};     // where there is no message
  std::unique_ptr<std::byte[]> source = {};  // where the bytes are that are here already, as those of an early message
  size_t done = 0;

  std::byte* to() const { return message ? message->data : early->bytes.get(); }
};

// The frame that is being read from a link.
struct Incoming {
  Header header;
  size_t header_bytes = 0;
  bool is_begun = false;
  std::byte* to = nullptr;  // where the bytes go; null: they are thrown away
  size_t received = 0;
  std::shared_ptr<Message> message;  // of an eager message
  std::list<Early>::iterator early;  // the same, if nobody asked for it yet
  bool is_early = false;
};

struct Correspondent {
  // Eager messages that nobody has received yet have at most so many bytes.
  static constexpr size_t all_credit = 4 * 1024 * 1024;

  Link* link = nullptr;  // null while there is none
  bool is_requested = false;
  std::exception_ptr failure;  // the link has ended, at this moment, and nobody has said yet that the peer leaves
  double failed_at = 0;

  // Outward: frames in order, and after them the bytes that the peer wants, by the offer's number.
  std::deque<Frame> frames;
  std::deque<uint64_t> contents;
  size_t credit = all_credit;

  // Inward.
  Incoming incoming;
  size_t owed = 0;                       // credit to be returned
  std::map<uint64_t, Arrival> awaited;   // by number: wanted, and not all here
  std::list<Arrival> readings;           // offered messages to be read; a thread reads the first one
  bool is_being_read = false;

  // The peer leaves: it asks to be heard out (1), says `leaving` (2), is told `heard` (3), and is gone (4).
  bool is_expected = false;   // 1, as the Watch says, until 3 or 4
  bool is_leaving = false;    // 2: what it has kept is void
  bool is_answered = false;   // 3 is among the frames, or written
  bool is_closed = false;     // 3 is written, or the link has ended: it is not used any more
  bool is_gone = false;       // 4, as the Watch says
  // This rank leaves:
  bool is_told = false;       // `leaving` is among the frames, or written
  bool has_heard = false;     // the peer has answered
};

}  // namespace shoal
