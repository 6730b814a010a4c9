#include "transport/listener.h"

#include <sys/epoll.h>

#include <cerrno>
#include <iterator>
#include <utility>

#include "transport/tcp_socket.h"

namespace shoal {

namespace {

// Strangers who only connect must not use up this process's descriptors: at most this many have one, and the others
// wait in the system's queue. A member needs one round trip for its proof; a connection that takes longer than
// `patience` is closed to make room.
constexpr size_t most_guests = 128;
constexpr double patience = 0.25;

// Seconds without accepting while there is no room, or no descriptor is left.
constexpr double full_pause = 0.01, exhaustion_pause = 0.1;

}  // namespace

Listener::Listener(const std::string& bind_address, double limit, EventLoop& loop)
    : loop_(loop), socket_(listen_on(bind_address)), limit_(limit) {}

std::string Listener::address() const { return address_of(socket_); }

void Listener::open(Handshake::Find find, Admit admit) {
  find_ = std::move(find);
  admit_ = std::move(admit);
  loop_.add(socket_.number(), EPOLLIN, [this](uint32_t) { accept_all(); });
}

void Listener::close() {
  loop_.cancel(pause_);
  loop_.remove(socket_.number());
  while (!guests_.empty()) part_with(guests_.begin());
}

void Listener::look_again() {
  for (auto guest = guests_.begin(); guest != guests_.end();) {
    const auto next = std::next(guest);
    if (guest->is_parked) converse(guest);
    guest = next;
  }
}

void Listener::accept_all() {
  for (;;) {
    if (!make_room()) return pause(full_pause);
    Descriptor socket = accept_from(socket_);
    if (socket) {
      welcome(std::move(socket));
      if (guests_.size() >= most_guests) return;  // nobody makes room for nobody
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return;
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      return pause(exhaustion_pause);
    }
    // Any other error concerns only that one connection, which is gone.
  }
}

bool Listener::make_room() {
  if (guests_.size() < most_guests) return true;
  const std::chrono::duration<double> age = EventLoop::Clock::now() - guests_.front().since;
  if (age.count() < patience) return false;
  refuse(guests_.begin());
  return true;
}

void Listener::pause(double seconds) {
  loop_.change(socket_.number(), 0);
  pause_ = loop_.after(seconds, [this] { loop_.change(socket_.number(), EPOLLIN); });
}

void Listener::welcome(Descriptor socket) {
  const auto guest = guests_.emplace(guests_.end(), std::move(socket), Handshake::accept(find_), EventLoop::Clock::now());
  guest->limit = loop_.after(limit_, [this, guest] { refuse(guest); });
  loop_.add(guest->socket.number(), EPOLLIN, [this, guest](uint32_t) { converse(guest); });
  converse(guest);
}

void Listener::converse(Guests::iterator guest) {
  const Handshake::Progress progress = guest->handshake.converse(guest->socket.number()).progress;
  if (progress == Handshake::Progress::underway) return;
  if (progress == Handshake::Progress::parked) {
    if (guest->is_parked) return;
    guest->is_parked = true;
    return loop_.change(guest->socket.number(), 0);  // ignore further data from it
  }
  if (progress != Handshake::Progress::done) return refuse(guest);
  const Purpose purpose = guest->handshake.purpose();
  admit_(purpose, part_with(guest));
}

Descriptor Listener::part_with(Guests::iterator guest) {
  loop_.cancel(guest->limit);
  loop_.remove(guest->socket.number());
  Descriptor socket = std::move(guest->socket);
  guests_.erase(guest);
  return socket;
}

void Listener::refuse(Guests::iterator guest) {
  refused_.fetch_add(1, std::memory_order_relaxed);
  part_with(guest);
}

}  // namespace shoal
