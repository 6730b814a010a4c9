// Leaving without losing data of complete sends.
//
// A complete send is delivered even if its sender leaves before the receiver asks. So a leaving rank makes its peers
// receive all that it sent them, and waits until they confirm it:
//
//   1. Its Watch tells the peers' Watches, whose threads always run: the mailboxes there begin to listen, even if no
//      thread waits for a message.
//   2. Its mailbox fails the incomplete sends, and then says `leaving`, after all frames of the complete ones.
//   3. A peer that has read `leaving` moves offered copies into its own memory. Messages that were announced, or that
//      are in the leaving rank's own memory, are void. Then the peer says `heard`.
//   4. When all peers have answered or ended, or time has run out, the leaving rank says goodbye, and its links may
//      close.
//
// Memory that a peer may still read is never used for anything else, before or after that: see Offers.

#include <algorithm>
#include <string>
#include <utility>

#include "algorithms/mailbox.h"
#include "algorithms/mailbox_posting.h"

namespace shoal {

// --- on the leaving rank ---

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

// Whether a peer may not have received all that it was sent. A network connection stays open until both ends know that
// nothing is in flight, because the system might drop it.
bool Mailbox::is_to_be_told(int peer) const {
  const Correspondent& to = with(peer);
  if (to.link == nullptr || to.is_closed || to.is_gone || to.is_leaving) return false;
  return !peers_.is_here(peer) || !to.frames.empty() || !to.link->is_drained() || offers_.has_any_for(peer);
}

// Changes the frames so that they do not need the application's memory. A partly written frame continues from a copy. A
// void message replaces a message that was not begun, so that later messages do not match its receive.
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
      frame.header.number = offers_.add({-1, nullptr, nullptr, 0});  // an empty offer
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
    // A peer that leaves too receives nothing more, but waits for its answer.
    if (each.is_leaving) return each.is_answered && each.frames.empty();
    return each.frames.empty() && (!each.is_told || each.has_heard);
  };
  while (delivers_ && !std::all_of(correspondents_.begin(), correspondents_.end(), is_done)) {
    if (deadline.has_passed()) break;
    if (!progress()) sleep(lock, 0.005);
  }
  delivers_ = false;
}

// --- on its peers ---

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

// A peer has said `leaving`: receives the messages of which it has copies.
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
