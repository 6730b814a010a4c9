// Frames on the links to and from peers. The lock is held.

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>

#include "algorithms/mailbox.h"

namespace shoal {

namespace {

// The most bytes that are written together with a header.
constexpr size_t joined_bytes = 1024;

// Writes a piece of a frame; 0 if there is no room.
size_t write(const Frame& frame, Link& link, size_t limit) {
  const size_t header = written_size(frame.header), bytes = bytes_after(frame.header);
  if (frame.written >= header) {
    const size_t done = frame.written - header;
    return link.send(frame.bytes + done, std::min(bytes - done, limit));
  }
  std::array<std::byte, sizeof(Header) + joined_bytes> joined;
  const size_t first = std::min(bytes, joined_bytes);
  std::memcpy(joined.data(), &frame.header, header);
  if (first > 0) std::memcpy(joined.data() + header, frame.bytes, first);
  return link.send(joined.data() + frame.written, header + first - frame.written);
}

}  // namespace

// Moves what can be moved; true if anything moved. Messages of all peers are received, wanted yet or not: a wait for
// one peer must not block another peer.
bool Mailbox::progress() {
  if (broken_ && !delivers_) return false;
  bool moved = false;
  attempt([&] {
    if (!delivers_) {
      if (alarm_.is_raised()) take_in_what_came();
      alarm_.check();
    }
    for (int step = 0; step < peers_.size; ++step) {
      const int peer = (first_ + step) % peers_.size;
      moved |= serve(peer, serving_bytes);
      if (with(peer).failure) judge_failure(with(peer));
      if (!moved || !somebody_posts()) continue;
      first_ = peer + 1;
      break;
    }
  });
  return moved;
}

bool Mailbox::is_connected(int peer) {
  Correspondent& with_peer = with(peer);
  if (with_peer.link == nullptr) with_peer.link = peers_.links.find(peer);
  return with_peer.link != nullptr && !with_peer.is_closed;
}

// Writes and reads at most `limit` bytes.
bool Mailbox::serve(int peer, size_t limit) {
  if (!is_connected(peer)) return false;
  Correspondent& with_peer = with(peer);
  try {
    const bool written = write_frames(peer, limit);
    return read_frames(peer, limit) || written;
  } catch (const Failure&) {
    with_peer.is_closed = true;
    with_peer.failure = std::current_exception();
    with_peer.failed_at = Deadline::now();
    return false;
  }
}

// The links of a peer end when it leaves, which only concerns threads that wait for it. The Watch reports that it left,
// maybe after the end of the link was seen.
void Mailbox::judge_failure(Correspondent& with_peer) {
  constexpr double grace = 1;
  if (delivers_ || with_peer.is_expected || with_peer.is_leaving || with_peer.is_gone) {
    with_peer.failure = nullptr;
  } else if (Deadline::now() > with_peer.failed_at + grace) {
    std::rethrow_exception(with_peer.failure);
  }
}

// Data that a peer sent before it ended is still received.
void Mailbox::take_in_what_came() {
  for (int peer = 0; peer < peers_.size; ++peer) {
    try {
      if (is_connected(peer)) read_frames(peer, SIZE_MAX);
    } catch (const Failure&) {
      // The peer or its memory is gone. The alarm says why.
    }
  }
}

// --- outward ---

void Mailbox::push(int peer, Frame frame) {
  with(peer).frames.push_back(std::move(frame));
  ++frames_;
}

void Mailbox::answer(int peer, Header::Kind kind, uint64_t number) {
  push(peer, {.header = {.kind = kind, .number = number}});
}

bool Mailbox::write_frames(int peer, size_t limit) {
  Correspondent& to = with(peer);
  bool moved = false;
  while (has_frame(to)) {
    Frame& frame = to.frames.front();
    if (frame.written == 0) frame.header.returned += std::exchange(to.owed, 0);
    while (frame.written < frame.size()) {
      if (limit == 0 || (moved && somebody_posts())) return moved;
      const size_t sent = write(frame, *to.link, std::min(limit, piece_bytes));
      if (sent == 0) return moved;
      moved = true;
      frame.written += sent;
      limit -= std::min(limit, sent);
    }
    end_frame(to, frame);
    to.frames.pop_front();
  }
  return moved;
}

// Whether there is a frame to write; if there is none, makes one from content that the peer wants.
bool Mailbox::has_frame(Correspondent& to) {
  if (!to.frames.empty() || to.contents.empty()) return !to.frames.empty();
  const uint64_t number = to.contents.front();
  const Offer& offer = *offers_.find(number);  // its send is not complete
  const size_t bytes = std::min(content_bytes, offer.bytes - offer.sent);
  const Header header{.kind = Header::Kind::content, .bytes = bytes, .number = number};
  to.frames.push_back({.header = header, .bytes = offer.data + offer.sent});
  ++frames_;
  return true;
}

// All of a frame is written.
void Mailbox::end_frame(Correspondent& to, const Frame& frame) {
  --frames_;
  if (frame.message) finish(*frame.message);
  if (frame.header.kind == Header::Kind::heard) to.is_closed = true;
  if (frame.header.kind != Header::Kind::content) return;
  Offer* offer = offers_.find(frame.header.number);
  if (offer == nullptr) return;  // this rank leaves, and the send has failed
  offer->sent += frame.header.bytes;
  if (offer->sent < offer->bytes) return;
  finish(*offer->message);
  offers_.remove(frame.header.number);
  to.contents.pop_front();
  --frames_;
}

// --- inward ---

bool Mailbox::read_frames(int peer, size_t limit) {
  Correspondent& from = with(peer);
  Incoming& in = from.incoming;
  bool moved = false;
  const auto read = [&](std::byte* to, size_t bytes) {
    if (limit == 0 || (moved && somebody_posts())) return size_t{0};
    const size_t got = from.link->receive(to, std::min(bytes, std::clamp(limit, short_header, piece_bytes)));
    limit -= std::min(limit, got);
    moved |= got > 0;
    return got;
  };
  while (!from.is_closed) {
    const size_t header = in.header_bytes < short_header ? short_header : written_size(in.header);
    if (in.header_bytes < header) {
      const size_t got = read(reinterpret_cast<std::byte*>(&in.header) + in.header_bytes, header - in.header_bytes);
      if (got == 0) return moved;
      in.header_bytes += got;
      continue;
    }
    if (!std::exchange(in.is_begun, true)) begin(peer, in);
    const size_t total = bytes_after(in.header);
    if (in.received < total) {
      std::byte thrown_away[4096];
      const size_t left = total - in.received;
      const size_t got = in.to != nullptr ? read(in.to + in.received, left)
                                          : read(thrown_away, std::min(sizeof thrown_away, left));
      if (got == 0) return moved;
      in.received += got;
      continue;
    }
    end(peer, in);
    in = Incoming{};
  }
  return moved;
}

// A header has arrived: finds the destination of the bytes after it.
void Mailbox::begin(int peer, Incoming& in) {
  Correspondent& from = with(peer);
  const Header& header = in.header;
  from.credit += header.returned;
  if (header.kind == Header::Kind::eager && header.bytes >= eager_elsewhere) {  // memory is made for it unasked
    throw Failure(Code::system, peer, "rank " + std::to_string(peer) + " sent more than it may without asking");
  }
  if (header.kind == Header::Kind::offered && !peers_.is_here(peer)) {
    throw Failure(Code::system, peer, "rank " + std::to_string(peer) + " offers memory of another host");
  }
  if (header.kind == Header::Kind::content) {
    const auto found = from.awaited.find(header.number);
    if (found == from.awaited.end()) return;
    const Arrival& arrival = found->second;
    if (header.bytes > arrival.header.bytes - arrival.done) {
      throw Failure(Code::system, peer, "rank " + std::to_string(peer) + " sent more than it had announced");
    }
    in.to = arrival.to() + arrival.done;
  } else if (header.kind == Header::Kind::eager) {
    in.message = match_posted(peer, header.tag);
    if (in.message) {
      if (!check_size(peer, header, *in.message)) in.message = nullptr;
      if (in.message) in.to = in.message->data;
      return;
    }
    in.early = early_.insert(early_.end(), {peer, header});
    in.early->bytes = std::make_unique_for_overwrite<std::byte[]>(header.bytes);
    in.to = in.early->bytes.get();
    in.is_early = true;
  }
}

// A whole frame has arrived.
void Mailbox::end(int peer, Incoming& in) {
  Correspondent& from = with(peer);
  const Header& header = in.header;
  switch (header.kind) {
    case Header::Kind::eager:
      if (in.is_early) {
        in.early->is_complete = true;
        if (in.early->wanted_by) deliver(in.early);
        break;
      }
      if (in.message) finish(*in.message);
      return_credit(peer, header.bytes);
      break;
    case Header::Kind::announced:
    case Header::Kind::offered:
      if (const auto message = match_posted(peer, header.tag)) {
        accept(peer, header, message);
      } else {
        early_.push_back({peer, header});
      }
      break;
    case Header::Kind::content:
      if (const auto found = from.awaited.find(header.number); found != from.awaited.end()) {
        Arrival& arrival = found->second;
        arrival.done += header.bytes;
        if (arrival.done < arrival.header.bytes) break;
        finish(*arrival.message);
        from.awaited.erase(found);
      }
      break;
    case Header::Kind::wanted:
      if (const Offer* offer = offers_.find(header.number); offer != nullptr && offer->message) {
        from.contents.push_back(header.number);
        ++frames_;
      }
      break;
    case Header::Kind::taken:
      if (const Offer* offer = offers_.find(header.number)) {
        if (offer->message) finish(*offer->message);
        offers_.remove(header.number);
      }
      break;
    case Header::Kind::credit:
      break;
    case Header::Kind::leaving:
      hear_out(peer);
      break;
    case Header::Kind::heard:
      from.has_heard = true;
      break;
  }
}

// An eager message was received: its sender may send as many bytes again. The next header to it says so, or a header of
// its own when there is much credit.
void Mailbox::return_credit(int peer, size_t bytes) {
  Correspondent& to = with(peer);
  to.owed += bytes;
  const bool has_header_to_write = !to.frames.empty() && to.frames.back().written == 0;
  if (to.owed >= Correspondent::all_credit / 4 && !has_header_to_write) answer(peer, Header::Kind::credit);
}

}  // namespace shoal
