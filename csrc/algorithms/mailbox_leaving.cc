// Leaving without losing what was promised.
//
// A send that is complete is delivered, though its sender leaves before the receiver asks. So who leaves has its peers
// take in all that they were sent, and waits until they say that they have:
//
//   1. Its Watch tells the peers' Watches, threads that are always there: their mailboxes begin to listen, even if
//      nobody waits for a message there.
//   2. Its mailbox fails the sends that are not complete, and then says `leaving`, behind all frames of those that are.
//   3. A peer that has read `leaving` takes copies that were offered into memory of its own. What was announced, or
//      lies in the leaver's own memory, is void: nobody can have it any more. Then it says `heard`.
//   4. When all have, or have ended, or time has run out, the leaver says goodbye, and its links may go.
//
// Nothing that a peer may still read is given to another use before that, nor after it: see Offers.

#include <algorithm>
#include <string>
#include <utility>

#include "algorithms/mailbox.h"
#include "algorithms/mailbox_posting.h"

namespace shoal {

// --- of who leaves ---

void Mailbox::close(const std::function<bool()>& raise) {
  const Posting posting(*this);
  const bool is_in_order = raise() && !broken_;
  if (broken_) return;
  std::vector<int> told;
  for (int peer = 0; is_in_order && peer < peers_.size; ++peer) {
    if (is_to_be_told(peer)) told.push_back(peer);
  }
  for (Correspondent& each : correspondents_) keep_what_is_promised(each);
  try {
    alarm_.check();
  } catch (...) {
    fail_all(std::current_exception());
  }
  offers_.remove_uncopied();
  delivers_ = is_in_order;
  for (const int peer : told) {
    with(peer).is_told = true;
    answer(peer, Header::Kind::leaving);
  }
  for (int peer = 0; peer < peers_.size; ++peer) answer_if_heard(peer);
}

// Whether a peer may lack something that it was sent. A network's connection is not closed before both ends know that
// nothing is on its way, as the system might throw it away.
bool Mailbox::is_to_be_told(int peer) const {
  const Correspondent& to = with(peer);
  if (to.link == nullptr || to.is_closed || to.is_gone || to.is_leaving) return false;
  return !peers_.is_here(peer) || !to.frames.empty() || !to.link->is_drained() || offers_.has_any_for(peer);
}

// Makes the frames such that they need nothing of the application's memory. A frame that is partly written goes on
// from a copy. The place of a message that was not begun is taken by one that is void: those behind it must not be
// taken for it.
void Mailbox::keep_what_is_promised(Correspondent& to) {
  to.contents.clear();
  std::erase_if(to.frames, [](const Frame& frame) {
    return frame.header.kind == Header::Kind::content && frame.written == 0;
  });
  for (Frame& frame : to.frames) {
    if (bytes_after(frame.header) == 0 && !frame.message) continue;
    if (frame.written > 0) {
      frame.kept.assign(frame.bytes, frame.bytes + bytes_after(frame.header));
      frame.bytes = frame.kept.data();
    } else {
      frame.header.kind = Header::Kind::announced;
      frame.header.number = offers_.add({-1, nullptr, nullptr, 0});  // of nothing
    }
  }
}

void Mailbox::settle() {
  std::unique_lock lock(mutex_);
  read_.wait(lock, [this] { return readings_ == 0; });
}

void Mailbox::hand_over(const Deadline& deadline) {
  std::unique_lock lock(mutex_);
  const auto is_done = [](const Correspondent& each) {
    if (each.link == nullptr || each.is_closed || each.is_gone) return true;
    // One that leaves too will hear nothing more, but waits for its answer.
    if (each.is_leaving) return each.is_answered && each.frames.empty();
    return each.frames.empty() && (!each.is_told || each.has_heard);
  };
  while (delivers_ && !std::all_of(correspondents_.begin(), correspondents_.end(), is_done)) {
    if (deadline.has_passed()) break;
    if (!progress()) sleep(lock, 0.005);
  }
  delivers_ = false;
}

// --- of its peers ---

void Mailbox::note_leaving(int peer) {
  const Posting posting(*this);
  Correspondent& from = with(peer);
  if (broken_ || from.is_expected || from.is_leaving || from.is_gone) return;
  from.is_expected = true;
  ++expected_;
  leave_to_thread(true);
}

void Mailbox::note_gone(int peer) {
  {
    const Posting posting(*this);
    Correspondent& from = with(peer);
    from.is_gone = true;
    stop_expecting(from);
  }
  wake();
}

// A peer has said `leaving`: takes in what it has copies of.
void Mailbox::hear_out(int peer) {
  Correspondent& from = with(peer);
  from.is_leaving = true;
  if (!broken_) {
    for (auto early = early_.begin(); early != early_.end(); ++early) {
      if (early->peer != peer || !early->header.is_copy || early->bytes) continue;
      early->bytes = std::make_unique_for_overwrite<std::byte[]>(early->header.bytes);
      from.readings.push_back({.header = early->header, .early = early});
      ++readings_;
    }
    for (auto& [number, arrival] : from.awaited) fail(*arrival.message, left(peer));
    from.awaited.clear();
  }
  answer_if_heard(peer);
}

void Mailbox::answer_if_heard(int peer) {
  Correspondent& from = with(peer);
  if (!from.is_leaving || from.is_answered || !from.readings.empty()) return;
  from.is_answered = true;
  answer(peer, Header::Kind::heard);
  stop_expecting(from);
}

void Mailbox::stop_expecting(Correspondent& from) {
  if (std::exchange(from.is_expected, false)) --expected_;
}

std::exception_ptr Mailbox::left(int peer) {
  const std::string text = "rank " + std::to_string(peer) + " left the group before its message was received";
  return std::make_exception_ptr(Failure(Code::peer_lost, peer, text));
}

}  // namespace shoal
