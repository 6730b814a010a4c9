#include "transport/listener.h"

#include <sys/epoll.h>

#include <cerrno>
#include <utility>

#include "transport/tcp_socket.h"

namespace shoal {

namespace {

// Strangers who only connect must not use up this process's descriptors.
constexpr size_t most_guests = 512;

// Seconds without accepting when there are no descriptors left.
constexpr double exhaustion_pause = 0.1;

}  // namespace

Listener::Listener(const std::string& bind_address, double limit, EventLoop& loop)
    : loop_(loop), socket_(listen_on(bind_address)), limit_(limit) {}

std::string Listener::address() const { return address_of(socket_); }

void Listener::open(const Secret& secret, int rank, Admit admit) {
  secret_ = secret;
  rank_ = rank;
  admit_ = std::move(admit);
  loop_.add(socket_.number(), EPOLLIN, [this](uint32_t) { accept_all(); });
}

void Listener::close() {
  loop_.cancel(pause_);
  loop_.remove(socket_.number());
  while (!guests_.empty()) part_with(guests_.begin());
}

void Listener::accept_all() {
  for (;;) {
    Descriptor socket = accept_from(socket_);
    if (socket) {
      welcome(std::move(socket));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return;
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      return pause();
    }
    // Any other error is about that one connection, which is gone.
  }
}

void Listener::pause() {
  loop_.change(socket_.number(), 0);
  pause_ = loop_.after(exhaustion_pause, [this] { loop_.change(socket_.number(), EPOLLIN); });
}

void Listener::welcome(Descriptor socket) {
  if (guests_.size() == most_guests) refuse(guests_.begin());
  const auto guest = guests_.emplace(guests_.end(), std::move(socket), Handshake::accept(secret_, rank_));
  guest->limit = loop_.after(limit_, [this, guest] { refuse(guest); });
  loop_.add(guest->socket.number(), EPOLLIN, [this, guest](uint32_t) { converse(guest); });
  converse(guest);
}

void Listener::converse(Guests::iterator guest) {
  const Handshake::Progress progress = guest->handshake.converse(guest->socket.number()).progress;
  if (progress == Handshake::Progress::underway) return;
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
