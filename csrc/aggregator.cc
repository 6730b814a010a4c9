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

// Whoever reaches an aggregator without a secret may greet. Beyond these numbers the oldest has to go: callers that
// have not greeted, sessions that not all hosts have come to, and sessions that have not reduced anything.
constexpr double greeting_limit = 5;  // seconds for a caller to greet
constexpr size_t most_callers = 1024;
constexpr size_t most_unused = 256;                      // sessions
size_t most_guests() { return descriptor_limit() / 2; }  // connections of sessions that wait
constexpr double exhaustion_pause = 0.1;                 // seconds without accepting when descriptors are used up
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

Aggregator::~Aggregator() {
  loop_.stop();
  for (AggregationSession& session : sessions_) session.end();  // all at once: each takes a moment
}

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
  if (!has_run_out(errno) && errno != ENOBUFS) return;
  // Whoever could not be accepted is still there.
  if (!callers_.empty()) {
    dismiss(callers_.begin());
  } else if (!waiting_.empty()) {
    dismiss(waiting_.begin());
  }
  pause();
}

void Aggregator::pause() {
  loop_.change(listening_.number(), 0);
  pause_ = loop_.after(exhaustion_pause, [this] { loop_.change(listening_.number(), EPOLLIN); });
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

void Aggregator::dismiss(Gatherings::iterator gathering) {
  for (auto& [slice, meeting] : gathering->meetings) {
    for (auto& [place, socket] : meeting.places) loop_.remove(socket.number());
    count(*gathering, -static_cast<int>(meeting.places.size()));
  }
  gathering->meetings.clear();
  while (!gathering->pulses.empty()) {
    const bool is_last = gathering->pulses.size() == 1;
    end_pulse(gathering, gathering->pulses.begin());
    if (is_last) return;  // it is forgotten
  }
  forget_if_empty(gathering);
}

void Aggregator::admit(const Greeting& greeting, Descriptor socket) {
  sessions_.remove_if([](const AggregationSession& session) { return session.has_ended(); });
  const Gatherings::iterator gathering = gathering_of(greeting);
  if (greeting.stream == pulse_stream) {
    add_pulse(gathering, greeting, std::move(socket));
  } else {
    add_place(gathering, greeting, std::move(socket));
  }
  forget_if_empty(gathering);  // it was not let in
  while (guests_ > most_guests() && waiting_.size() > 1) dismiss(waiting_.begin());
}

Aggregator::Gatherings::iterator Aggregator::gathering_of(const Greeting& greeting) {
  const std::string session(greeting.session.begin(), greeting.session.end());
  const auto found = gatherings_.find(session);
  if (found != gatherings_.end()) return found->second;
  const auto gathering = waiting_.insert(waiting_.end(), Gathering{session, {}, {}, false});
  gatherings_.emplace(session, gathering);
  return gathering;
}

// Connections of sessions that have begun are no guests.
void Aggregator::count(const Gathering& gathering, int connections) {
  if (!gathering.has_begun) guests_ += static_cast<size_t>(connections);
}

void Aggregator::forget_if_empty(Gatherings::iterator gathering) {
  if (!gathering->meetings.empty() || !gathering->pulses.empty()) return;
  gatherings_.erase(gathering->session);
  (gathering->has_begun ? begun_ : waiting_).erase(gathering);
}

void Aggregator::add_place(Gatherings::iterator gathering, const Greeting& greeting, Descriptor socket) {
  const int slice = greeting.slice;
  const std::pair place{greeting.host, greeting.stream};
  if (const auto met = gathering->meetings.find(slice); met != gathering->meetings.end()) {
    const Meeting& other = met->second;  // who comes with other numbers, or to a place that is taken, is left out
    if (other.hosts != greeting.hosts || other.streams != greeting.streams || other.places.contains(place)) return;
  }
  if (!let_in(socket)) return;
  Meeting& meeting = gathering->meetings[slice];
  meeting.hosts = greeting.hosts;
  meeting.streams = greeting.streams;
  const int number = meeting.places.emplace(place, std::move(socket)).first->second.number();
  count(*gathering, 1);
  // Data may wait there already: only the end of the connection counts.
  loop_.add(number, EPOLLRDHUP, [this, gathering, slice, place](uint32_t) { lose(gathering, slice, place); });
  if (meeting.places.size() == static_cast<size_t>(meeting.hosts) * static_cast<size_t>(meeting.streams)) {
    begin(gathering, slice);
  }
}

void Aggregator::add_pulse(Gatherings::iterator gathering, const Greeting& greeting, Descriptor socket) {
  if (!let_in(socket)) return;
  const double period = std::clamp(greeting.heartbeat / 4000.0, shortest_period, longest_period);
  const auto pulse = gathering->pulses.insert(gathering->pulses.end(), {std::move(socket), period, {}});
  count(*gathering, 1);
  loop_.add(pulse->socket.number(), EPOLLRDHUP, [this, gathering, pulse](uint32_t) { end_pulse(gathering, pulse); });
  beat(pulse);
}

void Aggregator::beat(Pulses::iterator pulse) {
  pulse->next = loop_.after(pulse->period, [this, pulse] { beat(pulse); });
  // A rank that does not read has its connection full of signs of life; one that has left is removed by its event.
  const char sign = 0;
  if (send(pulse->socket.number(), &sign, sizeof sign, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) return;
}

void Aggregator::end_pulse(Gatherings::iterator gathering, Pulses::iterator pulse) {
  loop_.cancel(pulse->next);
  loop_.remove(pulse->socket.number());
  gathering->pulses.erase(pulse);
  count(*gathering, -1);
  forget_if_empty(gathering);
}

// A host left before the others came.
void Aggregator::lose(Gatherings::iterator gathering, int slice, std::pair<int, int> place) {
  Meeting& meeting = gathering->meetings.at(slice);
  loop_.remove(meeting.places.at(place).number());
  meeting.places.erase(place);
  count(*gathering, -1);
  if (meeting.places.empty()) gathering->meetings.erase(slice);
  forget_if_empty(gathering);
}

void Aggregator::begin(Gatherings::iterator gathering, int slice) {
  const auto node = gathering->meetings.extract(slice);
  Meeting& meeting = node.mapped();
  AggregationSession::Sockets sockets(static_cast<size_t>(meeting.hosts));
  count(*gathering, -static_cast<int>(meeting.places.size()));
  for (auto& [place, socket] : meeting.places) {  // in the order of hosts, and then of streams
    loop_.remove(socket.number());
    sockets[static_cast<size_t>(place.first)].push_back(std::move(socket));
  }
  if (!gathering->has_begun) {
    for (const auto& [other, others] : gathering->meetings) count(*gathering, -static_cast<int>(others.places.size()));
    count(*gathering, -static_cast<int>(gathering->pulses.size()));
    gathering->has_begun = true;
    begun_.splice(begun_.end(), waiting_, gathering);
  }
  end_oldest_unused();
  try {
    sessions_.emplace_back(std::move(sockets), report_);
  } catch (const std::exception& error) {  // no thread: the hosts learn it when their connections end
    report_(std::string("a group was turned away: ") + error.what());
  }
}

void Aggregator::end_oldest_unused() {
  const auto is_unused = [](const AggregationSession& session) {
    return !session.has_reduced() && !session.is_ending();
  };
  if (std::count_if(sessions_.begin(), sessions_.end(), is_unused) < static_cast<long>(most_unused)) return;
  std::find_if(sessions_.begin(), sessions_.end(), is_unused)->end();
}

}  // namespace shoal
