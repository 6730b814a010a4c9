#include "transport/aggregator_pulse.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <sstream>
#include <utility>

namespace shoal {

std::string aggregator_advice() {
  return "\n  possible: a running `shoal aggregate` that every host reaches\n"
         "  change: start it, set SHOAL_AGGREGATOR (or Options.aggregator) to its address, or leave that empty";
}

AggregatorPulse::AggregatorPulse(EventLoop& loop, Descriptor socket, std::string name, Limits limits)
    : loop_(loop),
      socket_(std::move(socket)),
      guard_(socket_.number()),
      name_(std::move(name)),
      limits_(std::move(limits)) {
  loop_.call([this] {
    loop_.add(socket_.number(), EPOLLIN, [this](uint32_t) { take(); });
    judge();
  });
}

AggregatorPulse::~AggregatorPulse() {
  loop_.call([this] {
    loop_.cancel(next_look_);
    loop_.remove(socket_.number());
  });
}

void AggregatorPulse::take() {
  std::array<char, 64> beats;
  const ssize_t count = recv(socket_.number(), beats.data(), beats.size(), MSG_DONTWAIT);
  if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
  last_sign_ = EventLoop::Clock::now();
  if (count > 0) return;
  has_ended_ = true;
  loop_.remove(socket_.number());
  limits_.tell(Code::peer_lost, name_ + " ended, or the connection with it did" + aggregator_advice());
}

void AggregatorPulse::judge() {
  const Time now = EventLoop::Clock::now();
  const auto seconds_since = [now](Time then) { return std::chrono::duration<double>(now - then).count(); };
  // A rank that did not run for long cannot say that the aggregator did not run.
  if (seconds_since(last_look_) > limits_.silence / 2) last_sign_ = now;
  last_look_ = now;
  next_look_ = loop_.after(limits_.silence / 4, [this] { judge(); });
  if (has_ended_ || seconds_since(last_sign_) < limits_.silence || !limits_.is_waited_for()) return;
  has_ended_ = true;
  std::ostringstream text;
  text << name_ << " gave no sign of life for " << limits_.silence << " s" << aggregator_advice();
  limits_.tell(Code::peer_stopped, text.str());
}

}  // namespace shoal
