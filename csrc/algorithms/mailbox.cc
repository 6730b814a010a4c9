// Posts messages, matches sends with receives, and completes or fails them.

#include "algorithms/mailbox.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "algorithms/mailbox_posting.h"
#include "transport/peer_memory.h"

namespace shoal {

Mailbox::Mailbox(Peers peers, const Alarm& alarm)
    : peers_(std::move(peers)),
      alarm_(alarm),
      offers_(peers_.shared_buffers),
      correspondents_(static_cast<size_t>(peers_.size)) {}

Mailbox::~Mailbox() {
  {
    std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  wake();
  if (thread_.joinable()) thread_.join();
}

std::shared_ptr<Message> Mailbox::send(int peer, int tag, const void* data, size_t bytes) {
  auto* bytes_of_message = static_cast<std::byte*>(const_cast<void*>(data));
  auto message = std::make_shared<Message>(peer, tag, bytes_of_message, bytes);
  const bool is_here = peers_.is_here(peer);
  const bool is_large = bytes >= (is_here ? eager_here : eager_elsewhere);
  Offer offer{peer, message, message->data, bytes};
  Header header{.tag = tag, .bytes = bytes};
  if (is_here && is_large) prepare_offer(offer, header.offered);

  Posting posting(*this);
  Correspondent& to = with(peer);
  if (!broken_) request_link(peer);
  if (!broken_ && bytes > to.credit) attempt([&] { serve(peer, posting_bytes); });  // some may have come back
  if (broken_) {
    if (offer.copy != nullptr) offers_.give_back(offer.copy, bytes);
    std::rethrow_exception(broken_);
  }
  ++pending_;
  bool is_awaited = false;
  if (!is_large && bytes <= to.credit) {
    to.credit -= bytes;
    push(peer, {.header = header, .bytes = message->data, .message = message});
  } else {
    const bool is_shared = header.offered.input.descriptor >= 0;
    const bool is_readable = is_here && is_large && (is_shared || peers_.can_read_peers);
    header.kind = is_readable ? Header::Kind::offered : Header::Kind::announced;
    header.is_copy = offer.copy != nullptr;
    if (offer.copy != nullptr) finish(*std::exchange(offer.message, nullptr));
    if (is_readable && !is_shared) not_noted_.push_back(message);
    is_awaited = !is_readable;
    header.number = offers_.add(std::move(offer));
    push(peer, {.header = header});
  }
  attempt([&] { serve(peer, bytes < posting_bytes ? posting_bytes : serving_bytes); });
  leave_to_thread(is_awaited);  // the thread sends it when it is wanted
  return message;
}

// Tells a peer where to read a message: in a copy, where that is better. The lock is not held.
void Mailbox::prepare_offer(Offer& offer, Notice& notice) {
  notice.input = describe(offer.data, offer.bytes, peers_.shared_buffers);
  if (notice.input.descriptor < 0) offer.copy = offers_.copy(offer.data, offer.bytes);
  if (offer.copy != nullptr) {
    offer.data = static_cast<const std::byte*>(offer.copy);
    notice.input = describe(offer.copy, offer.bytes, peers_.shared_buffers);
  }
  notice.released = peers_.shared_buffers.released();
}

std::shared_ptr<Message> Mailbox::receive(int peer, int tag, void* data, size_t bytes) {
  auto message = std::make_shared<Message>(peer, tag, static_cast<std::byte*>(data), bytes);
  Posting posting(*this);
  if (broken_) std::rethrow_exception(broken_);
  for (int sender = 0; peer < 0 && sender < peers_.size; ++sender) request_link(sender);
  if (peer >= 0) request_link(peer);
  ++pending_;
  if (!match_early(message)) posted_.push_back(message);
  if (alarm_.is_raised()) {
    progress();
  } else if (peer >= 0) {
    attempt([&] { serve(peer, posting_bytes); });
  }
  leave_to_thread();
  return message;
}

void Mailbox::request_link(int peer) {
  if (!std::exchange(with(peer).is_requested, true)) peers_.links.request(peer);
}

// Gives the receive an early message that it asks for; returns whether there was one.
bool Mailbox::match_early(const std::shared_ptr<Message>& message) {
  for (auto early = early_.begin(); early != early_.end(); ++early) {
    if (early->wanted_by || early->header.tag != message->tag) continue;
    if (message->peer >= 0 && early->peer != message->peer) continue;
    message->sender = early->peer;
    if (early->bytes) {
      early->wanted_by = message;
      if (early->is_complete) deliver(early);
    } else {
      const Early kept = std::move(*early);
      early_.erase(early);
      accept(kept.peer, kept.header, message);
    }
    return true;
  }
  return false;
}

// The receive that asked for an arrived message; null if there is none.
std::shared_ptr<Message> Mailbox::match_posted(int peer, int tag) {
  const auto wanted = std::find_if(posted_.begin(), posted_.end(), [&](const auto& message) {
    return message->tag == tag && (message->peer < 0 || message->peer == peer);
  });
  if (wanted == posted_.end()) return nullptr;
  auto message = std::move(*wanted);
  posted_.erase(wanted);
  message->sender = peer;
  return message;
}

// Gets the bytes of a message that its sender keeps.
void Mailbox::accept(int peer, const Header& header, const std::shared_ptr<Message>& message) {
  Correspondent& from = with(peer);
  if (!check_size(peer, header, *message)) {
    answer(peer, Header::Kind::taken, header.number);
  } else if (from.is_leaving && !header.is_copy) {
    fail(*message, left(peer));
  } else if (header.kind == Header::Kind::offered) {
    from.readings.push_back({.header = header, .message = message});
    ++readings_;
  } else {
    from.awaited.emplace(header.number, Arrival{.header = header, .message = message});
    answer(peer, Header::Kind::wanted, header.number);
  }
}

// Gives an early message, whose bytes are here, to the receive that has asked for it.
void Mailbox::deliver(std::list<Early>::iterator early) {
  const std::shared_ptr<Message> message = early->wanted_by;
  const int peer = early->peer;
  const Header header = early->header;
  if (header.kind == Header::Kind::eager) return_credit(peer, header.bytes);
  if (check_size(peer, header, *message)) {
    if (header.bytes <= posting_bytes) {
      std::copy_n(early->bytes.get(), header.bytes, message->data);
      finish(*message);
    } else {
      with(peer).readings.push_back({.header = header, .message = message, .source = std::move(early->bytes)});
      ++readings_;
    }
  }
  early_.erase(early);
}

bool Mailbox::check_size(int peer, const Header& header, Message& message) {
  if (header.bytes == message.bytes) return true;
  const std::string text = "rank " + std::to_string(peer) + " sent " + std::to_string(header.bytes) +
                           " bytes where this rank receives " + std::to_string(message.bytes);
  fail(message, std::make_exception_ptr(Failure(Code::mismatch, peer, text)));
  return false;
}

void Mailbox::finish(Message& message) {
  --pending_;
  message.finished = Deadline::now();
  message.done.store(true, std::memory_order_release);
}

void Mailbox::fail(Message& message, std::exception_ptr failure) {
  message.failure = std::move(failure);
  finish(message);
}

void Mailbox::fail_all(const std::exception_ptr& failure) {
  if (!broken_) broken_ = failure;
  delivers_ = false;
  fail_pending();
}

// Fails all messages except those that a thread is reading now; that thread calls this again. Nothing touches the
// failed messages any more, because their owners may free them.
void Mailbox::fail_pending() {
  const auto fail_if_pending = [&](const std::shared_ptr<Message>& message) {
    if (message && !message->done.load(std::memory_order_relaxed)) fail(*message, broken_);
  };
  for (auto& message : posted_) fail_if_pending(message);
  posted_.clear();
  offers_.for_each([&](Offer& offer) { fail_if_pending(std::exchange(offer.message, nullptr)); });
  for (auto& early : early_) fail_if_pending(std::exchange(early.wanted_by, nullptr));
  for (Correspondent& each : correspondents_) {
    for (Frame& frame : each.frames) fail_if_pending(std::exchange(frame.message, nullptr));
    for (auto& [number, arrival] : each.awaited) fail_if_pending(arrival.message);
    each.awaited.clear();
    fail_if_pending(std::exchange(each.incoming.message, nullptr));
    if (!each.incoming.is_early) each.incoming.to = nullptr;
    const auto first = each.is_being_read ? std::next(each.readings.begin()) : each.readings.begin();
    for (auto arrival = first; arrival != each.readings.end(); ++arrival) fail_if_pending(arrival->message);
    readings_ -= static_cast<size_t>(std::distance(first, each.readings.end()));
    each.readings.erase(first, each.readings.end());
  }
  read_.notify_all();
}

}  // namespace shoal
