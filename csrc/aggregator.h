// A process that stands where the switch is, and adds up what the hosts of groups send it: the other end of
// `AggregatorLink`.
//
// It takes everyone who knows its secret, or everyone who reaches its address if it has none. A group's hosts find each
// other by a number made from the group's secret, so a stranger cannot join a group. What one session holds in memory is bounded by its hosts and the size of a chunk.
#pragma once

#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "aggregation_session.h"
#include "transport/aggregator_protocol.h"
#include "transport/descriptor.h"
#include "transport/event_loop.h"

namespace shoal {

class Aggregator {
 public:
  // Listens on "address:port"; port 0: one that the system chooses. Throws Failure: invalid, if it is no address;
  // system, if it is not this host's, or the port is taken. `secret`: that callers must know; none: everyone may call.
  // `report` is called on threads of the aggregator.
  Aggregator(const std::string& address_and_port, const std::optional<Secret>& secret,
             AggregationSession::Report report);
  ~Aggregator();  // ends all sessions

  // "address:port", where it listens.
  const std::string& address() const { return address_; }

  // Runs signal handlers until one of them raises: then throws Interrupted.
  void serve();

 private:
  struct Caller {  // who has not sent a whole greeting yet
    Descriptor socket;
    std::optional<Handshake> handshake;  // until the caller has proved that it knows the secret
    std::string come;
    EventLoop::Timer limit{};
  };
  using Callers = std::list<Caller>;
  struct Pulse {  // of a rank, which gets signs of life
    Descriptor socket;
    double period;
    EventLoop::Timer next{};
  };
  using Pulses = std::list<Pulse>;
  struct Meeting {  // the hosts of a session that not all have come to
    int streams = 0, missing = 0;
    AggregationSession::Sockets sockets;
  };
  using Key = std::pair<std::string, int>;  // the session and the slice

  void accept();
  void hear(Callers::iterator caller);
  bool has_proved(Callers::iterator caller);
  void dismiss(Callers::iterator caller);
  void admit(const Greeting& greeting, Descriptor socket);
  void lose(const Key& key, int host, int stream);
  void begin(const Key& key);
  void add_pulse(const Greeting& greeting, Descriptor socket);
  void beat(Pulses::iterator pulse);
  void end_pulse(Pulses::iterator pulse);

  const std::optional<Secret> secret_;
  const AggregationSession::Report report_;
  const Descriptor listening_;
  const std::string address_;
  EventLoop loop_;
  // Of the loop's thread:
  Callers callers_;
  Pulses pulses_;
  std::map<Key, Meeting> meetings_;
  std::list<AggregationSession> sessions_;
};

}  // namespace shoal
