#include "transport/aggregator_link.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <thread>
#include <utility>

#include "common/interruption.h"
#include "transport/tcp_socket.h"

namespace shoal {

namespace {

// Seconds in which an aggregator has to answer, and between attempts to connect to one that is not there yet.
constexpr double patience = 8, pause = 0.05;

// Milliseconds between checks of the alarm.
constexpr int alarm_look = 20;

}  // namespace

AggregatorLink::AggregatorLink(std::string address, const std::optional<Secret>& secret, const Greeting& greeting,
                               EventLoop& loop, AggregatorPulse::Limits limits, const Alarm& alarm)
    : address_(std::move(address)),
      name_("the aggregator " + address_),
      secret_(secret),
      greeting_(greeting),
      loop_(loop),
      limits_(std::move(limits)),
      alarm_(alarm) {}

Link& AggregatorLink::connect(Deadline deadline) {
  if (link_) return *link_;
  const Deadline limit = Deadline::after(std::min(patience, deadline.remaining()));
  pulse_ = std::make_unique<AggregatorPulse>(loop_, connect_stream(pulse_stream, limit), name_, limits_);
  std::vector<Descriptor> sockets;
  for (int stream = 0; stream < greeting_.streams; ++stream) sockets.push_back(connect_stream(stream, limit));
  for (const Descriptor& socket : sockets) guards_.push_back(std::make_unique<NotInherited>(socket.number()));
  link_ = std::make_unique<TcpLink>(-1, std::move(sockets), alarm_, name_);
  return *link_;
}

Descriptor AggregatorLink::connect_stream(int stream, Deadline limit) const {
  Descriptor socket;
  for (std::string trouble; !try_to_connect(socket, limit, trouble);) {
    if (limit.has_passed()) {
      throw Failure(Code::refused, -1, name_ + " cannot be reached: " + trouble + aggregator_advice());
    }
    std::this_thread::sleep_for(std::chrono::duration<double>(pause));
  }
  if (secret_) prove(socket, limit);
  Greeting greeting = greeting_;
  greeting.stream = stream;
  const ssize_t sent = ::send(socket.number(), &greeting, sizeof greeting, MSG_NOSIGNAL);  // a new connection has room
  std::array<char, aggregator_magic.size()> answer{};
  size_t come = 0;
  while (sent == static_cast<ssize_t>(sizeof greeting) && come < answer.size()) {
    await(socket, POLLIN, limit);
    const ssize_t count = recv(socket.number(), answer.data() + come, answer.size() - come, MSG_DONTWAIT);
    if (count == 0 || (count < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) break;
    if (count > 0) come += static_cast<size_t>(count);
  }
  if (come < answer.size() || answer != aggregator_magic) {
    turned_away("is it another program, or does it ask for a secret?");
  }
  return socket;
}

// Proves that this rank knows the secret, and lets the aggregator prove it.
void AggregatorLink::prove(const Descriptor& socket, Deadline limit) const {
  Handshake handshake = Handshake::dial(*secret_, {.group = number_of(*secret_), .from = 0, .to = 0});
  for (;;) {
    switch (handshake.converse(socket.number()).progress) {
      case Handshake::Progress::done:
        return;
      case Handshake::Progress::underway:
        await(socket, POLLIN, limit);
        break;
      default:
        turned_away("does it know the secret in the rank's SHOAL_AGGREGATOR_SECRET_FILE?");
    }
  }
}

void AggregatorLink::turned_away(const std::string& question) const {
  throw Failure(Code::refused, -1, name_ + " did not let this rank in: " + question + aggregator_advice());
}

// Returns false, and says why, if the connection did not come about.
bool AggregatorLink::try_to_connect(Descriptor& socket, Deadline limit, std::string& trouble) const {
  try {
    socket = begin_to_connect(address_);
  } catch (const Failure& failure) {
    if (failure.code == Code::invalid) throw;
    trouble = failure.what();
    return false;
  }
  trouble = "it does not answer";
  try {
    await(socket, POLLOUT, limit);
  } catch (const Failure& failure) {
    if (failure.code != Code::timeout) throw;
    return false;
  }
  int error = 0;
  socklen_t size = sizeof error;
  getsockopt(socket.number(), SOL_SOCKET, SO_ERROR, &error, &size);
  if (error != 0) trouble = std::generic_category().message(error);
  return error == 0;
}

void AggregatorLink::await(const Descriptor& socket, short events, Deadline limit) const {
  pollfd waited{socket.number(), events, 0};
  for (;;) {
    alarm_.check();
    run_signal_handlers();
    if (poll(&waited, 1, alarm_look) > 0) return;
    if (limit.has_passed()) throw Failure(Code::timeout, -1, name_ + " does not answer" + aggregator_advice());
  }
}

}  // namespace shoal
