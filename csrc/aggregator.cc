#include "aggregator.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <iterator>
#include <thread>
#include <utility>

#include "common/interruption.h"
#include "transport/tcp_socket.h"

namespace shoal {

namespace {

constexpr double greeting_limit = 5;  // seconds for a caller to greet
constexpr size_t most_callers = 1024;  // that have not greeted
constexpr double shortest_period = 0.02, longest_period = 60;  // seconds between signs of life

Descriptor listen_on_both(const std::string& address_and_port) {
  const auto [address, port] = split_address(address_and_port);
  return listen_on(address, port);
}

bool let_in(const Descriptor& socket) {
  return send(socket.number(), aggregator_magic.data(), aggregator_magic.size(), MSG_NOSIGNAL | MSG_DONTWAIT) > 0;
}

bool is_possible(const Greeting& greeting) {
  return greeting.magic == aggregator_magic && greeting.hosts > 0 && greeting.hosts <= most_aggregated_hosts &&
         greeting.streams > 0 && greeting.streams <= most_aggregated_streams && greeting.host >= 0 &&
         greeting.host < greeting.hosts && greeting.stream >= pulse_stream && greeting.stream < greeting.streams &&
         greeting.heartbeat >= 0;
}

}  // namespace

Aggregator::Aggregator(const std::string& address_and_port, const std::optional<Secret>& secret,
                       AggregationSession::Report report)
    : secret_(secret), report_(std::move(report)), listening_(listen_on_both(address_and_port)), address_(address_of(listening_)) {
  raise_descriptor_limit();
  loop_.start();
  loop_.call([this] { loop_.add(listening_.number(), EPOLLIN, [this](uint32_t) { accept(); }); });
}

Aggregator::~Aggregator() { loop_.stop(); }

void Aggregator::serve() {
  for (;;) {
    run_signal_handlers();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
}

void Aggregator::accept() {
  while (Descriptor socket = accept_from(listening_)) {
    if (callers_.size() >= most_callers) dismiss(callers_.begin());
    const auto caller = callers_.insert(callers_.end(), {std::move(socket), {}, {}, {}});
    caller->limit = loop_.after(greeting_limit, [this, caller] { dismiss(caller); });
    loop_.add(caller->socket.number(), EPOLLIN, [this, caller](uint32_t) { hear(caller); });
    if (secret_) {
      const auto find = [this](uint64_t group) {
        return group == number_of(*secret_) ? std::optional<Membership>({*secret_, 0}) : std::nullopt;
      };
      caller->handshake = Handshake::accept(find);
      hear(caller);  // sends the challenge
    }
  }
  // Whoever could not be accepted is still there: do not ask again at once.
  if (has_run_out(errno)) std::this_thread::sleep_for(std::chrono::milliseconds(100));
}

void Aggregator::hear(Callers::iterator caller) {
  if (caller->handshake && !has_proved(caller)) return;
  std::array<char, sizeof(Greeting)> come;
  const ssize_t count =
      recv(caller->socket.number(), come.data(), sizeof(Greeting) - caller->come.size(), MSG_DONTWAIT);
  if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
  if (count <= 0) return dismiss(caller);
  caller->come.append(come.data(), static_cast<size_t>(count));
  if (caller->come.size() < sizeof(Greeting)) return;
  Greeting greeting;
  std::memcpy(&greeting, caller->come.data(), sizeof greeting);
  loop_.remove(caller->socket.number());
  loop_.cancel(caller->limit);
  Descriptor socket = std::move(caller->socket);
  callers_.erase(caller);
  if (is_possible(greeting)) admit(greeting, std::move(socket));
}

// Whether the caller has just proved that it knows the secret; one that does not is dismissed.
bool Aggregator::has_proved(Callers::iterator caller) {
  const Handshake::Progress progress = caller->handshake->converse(caller->socket.number()).progress;
  if (progress == Handshake::Progress::done) {
    caller->handshake.reset();
    return true;
  }
  if (progress != Handshake::Progress::underway) dismiss(caller);
  return false;
}

void Aggregator::dismiss(Callers::iterator caller) {
  loop_.remove(caller->socket.number());
  loop_.cancel(caller->limit);
  callers_.erase(caller);
}

void Aggregator::admit(const Greeting& greeting, Descriptor socket) {
  sessions_.remove_if([](const AggregationSession& session) { return session.has_ended(); });
  if (greeting.stream == pulse_stream) return add_pulse(greeting, std::move(socket));
  const Key key{std::string(greeting.session.begin(), greeting.session.end()), greeting.slice};
  Meeting& meeting = meetings_[key];
  if (meeting.sockets.empty()) {
    meeting.streams = greeting.streams;
    meeting.missing = greeting.hosts * greeting.streams;
    meeting.sockets.resize(static_cast<size_t>(greeting.hosts));
    for (auto& streams : meeting.sockets) streams.resize(static_cast<size_t>(greeting.streams));
  }
  if (static_cast<int>(meeting.sockets.size()) != greeting.hosts || meeting.streams != greeting.streams) return;
  Descriptor& place = meeting.sockets[static_cast<size_t>(greeting.host)][static_cast<size_t>(greeting.stream)];
  if (place) return;
  if (!let_in(socket)) return;
  place = std::move(socket);
  // Data may wait there already: only the end of the connection counts.
  loop_.add(place.number(), EPOLLRDHUP, [this, key, host = greeting.host, stream = greeting.stream](uint32_t) {
    lose(key, host, stream);
  });
  if (--meeting.missing == 0) begin(key);
}

void Aggregator::add_pulse(const Greeting& greeting, Descriptor socket) {
  if (!let_in(socket)) return;
  const double period = std::clamp(greeting.heartbeat / 4000.0, shortest_period, longest_period);
  const auto pulse = pulses_.insert(pulses_.end(), {std::move(socket), period, {}});
  loop_.add(pulse->socket.number(), EPOLLRDHUP, [this, pulse](uint32_t) { end_pulse(pulse); });
  beat(pulse);
}

void Aggregator::beat(Pulses::iterator pulse) {
  pulse->next = loop_.after(pulse->period, [this, pulse] { beat(pulse); });
  // A rank that does not read has its connection full of signs of life; one that has left is removed by its event.
  const char sign = 0;
  if (send(pulse->socket.number(), &sign, sizeof sign, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) return;
}

void Aggregator::end_pulse(Pulses::iterator pulse) {
  loop_.cancel(pulse->next);
  loop_.remove(pulse->socket.number());
  pulses_.erase(pulse);
}

// A host left before the others came.
void Aggregator::lose(const Key& key, int host, int stream) {
  const auto found = meetings_.find(key);
  Meeting& meeting = found->second;
  Descriptor& place = meeting.sockets[static_cast<size_t>(host)][static_cast<size_t>(stream)];
  loop_.remove(place.number());
  place = Descriptor();
  const int places = static_cast<int>(meeting.sockets.size()) * meeting.streams;
  if (++meeting.missing == places) meetings_.erase(found);
}

void Aggregator::begin(const Key& key) {
  const auto found = meetings_.find(key);
  AggregationSession::Sockets sockets = std::move(found->second.sockets);
  meetings_.erase(found);
  for (const auto& streams : sockets) {
    for (const Descriptor& socket : streams) loop_.remove(socket.number());
  }
  try {
    sessions_.emplace_back(std::move(sockets), report_);
  } catch (const std::exception& error) {  // no thread: the hosts learn it when their connections end
    report_(std::string("a group was turned away: ") + error.what());
  }
}

}  // namespace shoal
