#include "transport/tcp_link.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace shoal {

namespace {

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

size_t left_in_stripe(uint64_t position) { return TcpLink::stripe_bytes - position % TcpLink::stripe_bytes; }

}  // namespace

TcpLink::TcpLink(int peer, std::vector<Descriptor> sockets, const Alarm& alarm, std::string name)
    : peer_(peer),
      sockets_(std::move(sockets)),
      alarm_(alarm),
      name_(name.empty() ? "rank " + std::to_string(peer) : std::move(name)) {}

size_t TcpLink::send(const void* data, size_t size) {
  const auto* bytes = static_cast<const char*>(data);
  size_t done = 0;
  while (done < size) {
    const size_t part = std::min(size - done, left_in_stripe(sent_));
    const ssize_t count = ::send(socket_at(sent_), bytes + done, part, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count < 0) {
      if (would_block(errno)) break;
      fail(std::generic_category().message(errno));
    }
    done += static_cast<size_t>(count);
    sent_ += static_cast<uint64_t>(count);
    if (static_cast<size_t>(count) < part) break;
  }
  return done;
}

size_t TcpLink::receive(void* data, size_t size) {
  auto* bytes = static_cast<char*>(data);
  size_t done = 0;
  while (done < size) {
    const size_t part = std::min(size - done, left_in_stripe(received_));
    const ssize_t count = recv(socket_at(received_), bytes + done, part, MSG_DONTWAIT);
    if (count == 0) fail("it was closed");
    if (count < 0) {
      if (would_block(errno)) break;
      fail(std::generic_category().message(errno));
    }
    done += static_cast<size_t>(count);
    received_ += static_cast<uint64_t>(count);
    if (static_cast<size_t>(count) < part) break;
  }
  return done;
}

bool TcpLink::append_poll(std::vector<pollfd>& fds, bool sending, bool receiving) {
  const int out = socket_at(sent_), in = socket_at(received_);
  if (sending && receiving && out == in) {
    fds.push_back({out, POLLIN | POLLOUT, 0});
  } else {
    if (sending) fds.push_back({out, POLLOUT, 0});
    if (receiving) fds.push_back({in, POLLIN, 0});
  }
  return true;
}

void TcpLink::interrupt() {
  for (const Descriptor& socket : sockets_) shutdown(socket.number(), SHUT_RDWR);
}

void TcpLink::fail(const std::string& what) const {
  alarm_.check();  // a peer that gave up because of a third rank said so before it closed this connection
  throw Failure(Code::peer_lost, peer_,
                "the connection with " + name_ + " ended: " + what);
}

}  // namespace shoal
