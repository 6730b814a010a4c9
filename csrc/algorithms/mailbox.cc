#include "algorithms/mailbox.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "transport/peer_memory.h"

namespace shoal {

Mailbox::Mailbox(Peers peers, const Alarm& alarm)
    : peers_(std::move(peers)),
      alarm_(alarm),
      outgoing_(static_cast<size_t>(peers_.size)),
      incoming_(static_cast<size_t>(peers_.size)),
      is_requested_(static_cast<size_t>(peers_.size)) {}

Mailbox::~Mailbox() {
  {
    std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  wake();
  if (thread_.joinable()) thread_.join();
  for (auto& [number, offered] : offered_) {
    if (offered.copy != nullptr) peers_.shared_buffers.release(offered.copy);  // peers only read it
  }
}

std::shared_ptr<Message> Mailbox::send(int peer, int tag, const void* data, size_t bytes) {
  auto* bytes_of_message = static_cast<std::byte*>(const_cast<void*>(data));
  auto message = std::make_shared<Message>(peer, tag, bytes_of_message, bytes);
  std::lock_guard lock(mutex_);
  if (broken_) std::rethrow_exception(broken_);
  request_link(peer);
  ++pending_;
  Outgoing outgoing{{Header::Kind::bytes, tag, bytes}, message->data, 0, message};
  if (bytes >= offered_bytes && peers_.is_here(peer) && offer(outgoing)) outgoing.message = nullptr;
  outgoing_[static_cast<size_t>(peer)].push_back(std::move(outgoing));
  progress();
  leave_to_thread();
  return message;
}

// Makes a message an offer, if the peer has a way to read it.
bool Mailbox::offer(Outgoing& outgoing) {
  const size_t bytes = outgoing.header.bytes;
  Notice& notice = outgoing.header.offered;
  Offered offered{outgoing.message, nullptr, bytes};
  notice.input = describe(outgoing.data, bytes, peers_.shared_buffers);
  if (notice.input.descriptor < 0 && bytes <= copied_bytes && copied_ + bytes <= copies_bytes) {
    offered.copy = peers_.shared_buffers.allocate(std::bit_ceil(bytes));
    std::memcpy(offered.copy, outgoing.data, bytes);
    copied_ += bytes;
    notice.input = describe(offered.copy, bytes, peers_.shared_buffers);
    finish(*outgoing.message);
    offered.message = nullptr;
  }
  if (notice.input.descriptor < 0 && !peers_.can_read_peers) return false;
  notice.released = peers_.shared_buffers.released();
  outgoing.header.kind = Header::Kind::offer;
  outgoing.header.number = next_number_;
  offered_.emplace(next_number_++, std::move(offered));
  return true;
}

std::shared_ptr<Message> Mailbox::receive(int peer, int tag, void* data, size_t bytes) {
  auto message = std::make_shared<Message>(peer, tag, static_cast<std::byte*>(data), bytes);
  std::lock_guard lock(mutex_);
  if (broken_) std::rethrow_exception(broken_);
  for (int sender = 0; peer < 0 && sender < peers_.size; ++sender) request_link(sender);
  if (peer >= 0) request_link(peer);
  ++pending_;
  for (auto early = early_.begin(); early != early_.end(); ++early) {
    if (early->wanted_by || early->header.tag != tag || (peer >= 0 && early->peer != peer)) continue;
    early->wanted_by = message;
    message->sender = early->peer;
    if (early->complete) {
      attempt([&] { deliver(*early); });
      early_.erase(early);
    }
    leave_to_thread();
    return message;
  }
  posted_.push_back(message);
  progress();
  leave_to_thread();
  return message;
}

void Mailbox::request_link(int peer) {
  const auto at = static_cast<size_t>(peer);
  if (!is_requested_[at]) peers_.links.request(peer);
  is_requested_[at] = true;
}

// Moves what can be moved; true if anything was. The lock is held. Everybody's messages are taken in,
// wanted yet or not: who waits for one peer must not block another.
bool Mailbox::progress() {
  if (broken_) return false;
  bool moved = false;
  attempt([&] {
    if (alarm_.is_raised()) take_in_what_came();
    alarm_.check();
    for (int peer = 0; peer < peers_.size; ++peer) {
      Link* link = peers_.links.find(peer);
      if (link == nullptr) continue;
      moved |= progress_sends(peer, *link);
      moved |= progress_receives(peer, *link);
    }
  });
  return moved || broken_;
}

// What a peer sent before it ended is its message all the same.
void Mailbox::take_in_what_came() {
  for (int peer = 0; peer < peers_.size; ++peer) {
    try {
      if (Link* link = peers_.links.find(peer)) progress_receives(peer, *link);
    } catch (const Failure&) {
      // It is gone, or its memory is. The alarm says why.
    }
  }
}

bool Mailbox::progress_sends(int peer, Link& link) {
  auto& queue = outgoing_[static_cast<size_t>(peer)];
  bool moved = false;
  while (!queue.empty()) {
    Outgoing& out = queue.front();
    constexpr size_t header = sizeof(Header);
    const size_t total = header + (out.header.kind == Header::Kind::bytes ? out.header.bytes : 0);
    while (out.sent < total) {
      const bool in_header = out.sent < header;
      const auto* from = in_header ? reinterpret_cast<const std::byte*>(&out.header) + out.sent
                                   : out.data + (out.sent - header);
      const size_t sent = link.send(from, in_header ? header - out.sent : total - out.sent);
      if (sent == 0) return moved;
      out.sent += sent;
      moved = true;
    }
    if (out.message) finish(*out.message);
    if (out.header.kind == Header::Kind::taken) --pending_;
    queue.pop_front();
    moved = true;
  }
  return moved;
}

bool Mailbox::progress_receives(int peer, Link& link) {
  Incoming& in = incoming_[static_cast<size_t>(peer)];
  bool moved = false;
  for (;;) {
    if (in.header_bytes < sizeof(Header)) {
      auto* const to = reinterpret_cast<std::byte*>(&in.header) + in.header_bytes;
      const size_t got = link.receive(to, sizeof(Header) - in.header_bytes);
      if (got == 0) return moved;
      moved = true;
      in.header_bytes += got;
      if (in.header_bytes < sizeof(Header)) continue;
      begin(peer, in);
    }
    const size_t total = in.header.kind == Header::Kind::bytes ? in.header.bytes : 0;
    while (in.received < total) {
      std::byte thrown_away[4096];
      const bool is_wanted = in.message || in.is_early;
      const size_t left = total - in.received;
      size_t got;
      if (is_wanted) {
        std::byte* const begin = in.message ? in.message->data : in.early->bytes.data();
        got = link.receive(begin + in.received, left);
      } else {
        got = link.receive(thrown_away, std::min(sizeof thrown_away, left));
      }
      if (got == 0) return moved;
      moved = true;
      in.received += got;
    }
    end(peer, in);
    in = Incoming{};
  }
}

// A header has come: finds who asked for the message, or keeps it.
void Mailbox::begin(int peer, Incoming& in) {
  if (in.header.kind == Header::Kind::taken) return;
  auto wanted = std::find_if(posted_.begin(), posted_.end(), [&](const auto& message) {
    return message->tag == in.header.tag && (message->peer < 0 || message->peer == peer);
  });
  if (wanted != posted_.end()) {
    in.message = *wanted;
    in.message->sender = peer;
    posted_.erase(wanted);
    if (!check_size(peer, in.header, *in.message)) in.message = nullptr;
    return;
  }
  early_.push_back({peer, in.header, {}, false, nullptr});
  in.early = std::prev(early_.end());
  in.is_early = true;
  if (in.header.kind == Header::Kind::bytes) in.early->bytes.resize(in.header.bytes);
}

// All of a message has come, or its offer.
void Mailbox::end(int peer, Incoming& in) {
  if (in.header.kind == Header::Kind::taken) {
    auto found = offered_.find(in.header.number);
    if (found == offered_.end()) return;
    const Offered& offered = found->second;
    if (offered.message) finish(*offered.message);
    if (offered.copy != nullptr) {
      peers_.shared_buffers.release(offered.copy);
      copied_ -= offered.bytes;
    }
    offered_.erase(found);
  } else if (in.is_early) {
    in.early->complete = true;
    if (in.early->wanted_by) {
      deliver(*in.early);
      early_.erase(in.early);
    }
  } else if (in.header.kind == Header::Kind::offer) {
    take(peer, in.header, in.message.get());
  } else if (in.message) {
    finish(*in.message);
  }
}

// Gives an early message to who asked for it since.
void Mailbox::deliver(Early& early) {
  const bool fits = check_size(early.peer, early.header, *early.wanted_by);
  if (early.header.kind == Header::Kind::offer) {
    return take(early.peer, early.header, fits ? early.wanted_by.get() : nullptr);
  }
  if (!fits) return;
  std::copy(early.bytes.begin(), early.bytes.end(), early.wanted_by->data);
  finish(*early.wanted_by);
}

// Reads what was offered, unless it does not fit (null), and tells its sender that it need not stay.
void Mailbox::take(int peer, const Header& header, Message* message) {
  if (message != nullptr) {
    constexpr uint64_t piece = 4 * 1024 * 1024;  // an alarm is heard in between
    for (uint64_t done = 0; done < header.bytes; done += piece) {
      const uint64_t bytes = std::min(piece, header.bytes - done);
      peers_.read(peer, header.offered, done, bytes, message->data + done);
      alarm_.check();
    }
    finish(*message);
  }
  ++pending_;
  const Header answer{Header::Kind::taken, 0, 0, {}, header.number};
  outgoing_[static_cast<size_t>(peer)].push_back({answer, nullptr, 0, nullptr});
  if (Link* link = peers_.links.find(peer)) progress_sends(peer, *link);
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

void Mailbox::fail_all(std::exception_ptr failure) {
  broken_ = failure;
  const auto fail_if_pending = [&](const std::shared_ptr<Message>& message) {
    if (message && !message->done.load(std::memory_order_relaxed)) fail(*message, failure);
  };
  for (auto& message : posted_) fail_if_pending(message);
  for (auto& [number, offered] : offered_) fail_if_pending(offered.message);
  for (auto& early : early_) fail_if_pending(early.wanted_by);
  for (auto& queue : outgoing_) {
    for (auto& out : queue) fail_if_pending(out.message);
  }
  for (auto& in : incoming_) fail_if_pending(in.message);
  changed_.notify_all();
}

}  // namespace shoal
