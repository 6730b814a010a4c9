#include "algorithms/mailbox.h"

#include <poll.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <string>

#include "common/interruption.h"
#include "common/quiet_thread.h"
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

// While there is one, the mailbox's own thread has nothing to do. Made and gone with the lock held.
class Mailbox::Waiter {
 public:
  Waiter(Mailbox& mailbox, std::unique_lock<std::mutex>& lock) : mailbox_(mailbox), lock_(lock) {
    ++mailbox_.waiters_;
  }
  ~Waiter() {
    if (!lock_.owns_lock()) lock_.lock();
    --mailbox_.waiters_;
    mailbox_.leave_to_thread();
  }
  Waiter(const Waiter&) = delete;

 private:
  Mailbox& mailbox_;
  std::unique_lock<std::mutex>& lock_;
};

void Mailbox::wait(Message& message, const Patience& patience, const Deadline& deadline) {
  if (!wait_until(message, patience, deadline)) {
    // Ends the other messages too, so that nothing is written any more to where this one's bytes are.
    std::lock_guard lock(mutex_);
    if (!message.done) attempt([&] { deadline.check(message.peer); });
  }
  if (message.failure) std::rethrow_exception(message.failure);
}

bool Mailbox::wait_until(Message& message, const Patience& patience, const Deadline& limit) {
  if (message.done.load(std::memory_order_acquire)) return true;
  constexpr unsigned rounds_per_look_at_the_clock = 256;
  std::unique_lock lock(mutex_);
  const Waiter waiter(*this, lock);
  int idle = 0;  // rounds since something moved
  for (unsigned round = 1; !message.done.load(std::memory_order_acquire); ++round) {
    idle = progress() ? 0 : idle + 1;
    const bool is_patient = idle > patience.spins + patience.yields;
    if ((is_patient || round % rounds_per_look_at_the_clock == 0) && limit.has_passed()) return false;
    if (idle == 0) continue;
    if (is_patient) sleep(lock);
    lock.unlock();
    if (is_patient) {
      run_signal_handlers();
    } else if (idle < patience.spins) {
      pause_briefly();
    } else {
      sched_yield();
    }
    lock.lock();
  }
  return true;
}

void Mailbox::wake() {
  if (peers_.doorbell != nullptr) {
    peers_.doorbell->value.fetch_add(1, std::memory_order_seq_cst);
    peers_.doorbell->wake();
  }
  changed_.notify_all();
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

// What goes wrong with one peer ends all messages, as it ends the group.
template <class Work>
void Mailbox::attempt(const Work& work) {
  try {
    work();
  } catch (...) {
    fail_all(std::current_exception());
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

// Until a peer rings, or a socket is ready. The lock is given up meanwhile.
void Mailbox::sleep(std::unique_lock<std::mutex>& lock) {
  std::vector<pollfd> fds;
  for (int peer = 0; peer < peers_.size; ++peer) {
    const bool is_sending = !outgoing_[static_cast<size_t>(peer)].empty();
    if (Link* link = peers_.links.find(peer)) link->append_poll(fds, is_sending, true);
  }
  const uint32_t seen = peers_.doorbell != nullptr ? peers_.doorbell->value.load() : 0;
  if (progress()) return;  // something came while this thread was getting ready
  lock.unlock();
  if (peers_.doorbell != nullptr && fds.empty()) {
    peers_.doorbell->sleep(seen, 0.005);
  } else {
    poll(fds.data(), fds.size(), peers_.doorbell != nullptr ? 1 : 5);
  }
  lock.lock();
}

// Has the thread go on with what is pending, unless somebody waits and so does it himself. Who posts a message
// mostly waits for it at once: while messages come and go the thread looks by itself now and then, and is only woken
// for what does not fit its link.
void Mailbox::leave_to_thread() {
  if (!is_left()) return;
  is_in_use_ = true;
  if (!thread_.joinable()) thread_ = start_quiet_thread([this] { run(); });
  const auto is_unsent = [](const auto& queue) { return !queue.empty(); };
  if (is_resting_ || std::any_of(outgoing_.begin(), outgoing_.end(), is_unsent)) changed_.notify_all();
}

void Mailbox::run() {
  constexpr std::chrono::microseconds between_looks{500};
  constexpr int longest_idleness = 100;  // looks
  std::unique_lock lock(mutex_);
  for (int idle = 0; !stopped_;) {
    if (is_left()) {
      if (!progress()) sleep(lock);
      continue;
    }
    idle = is_in_use_ ? 0 : idle + 1;
    is_in_use_ = false;
    if (idle < longest_idleness) {
      changed_.wait_for(lock, between_looks);
    } else {
      is_resting_ = true;
      changed_.wait(lock);
      is_resting_ = false;
    }
  }
}

}  // namespace shoal
