// A process that stands where the switch is, and adds up what the hosts of groups send it: the other end of
// `AggregatorLink`.
//
// It takes everyone who knows its secret, or everyone who reaches its address if it has none. A group's hosts find each
// other by a number made from the group's secret, so a stranger cannot join a group. What one session holds in memory is
// bounded by its hosts and the size of a chunk; what strangers hold, by the limits in aggregator.cc.
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
  struct Meeting {  // the hosts of a slice that not all have come to
    int hosts = 0, streams = 0;
    std::map<std::pair<int, int>, Descriptor> places;  // by host and stream
  };
  struct Gathering {  // the connections of one session, apart from those of its slices that have begun
    std::string session;
    std::map<int, Meeting> meetings;  // by slice
    Pulses pulses;
    bool has_begun = false;  // at least one slice: all hosts came to it
  };
  using Gatherings = std::list<Gathering>;

  void accept();
  void pause();
  void hear(Callers::iterator caller);
  bool has_proved(Callers::iterator caller);
  void dismiss(Callers::iterator caller);
  void dismiss(Gatherings::iterator gathering);
  void admit(const Greeting& greeting, Descriptor socket);
  Gatherings::iterator gathering_of(const Greeting& greeting);
  void add_place(Gatherings::iterator gathering, const Greeting& greeting, Descriptor socket);
  void lose(Gatherings::iterator gathering, int slice, std::pair<int, int> place);
  void begin(Gatherings::iterator gathering, int slice);
  void add_pulse(Gatherings::iterator gathering, const Greeting& greeting, Descriptor socket);
  void beat(Pulses::iterator pulse);
  void end_pulse(Gatherings::iterator gathering, Pulses::iterator pulse);
  void count(const Gathering& gathering, int connections);
  void forget_if_empty(Gatherings::iterator gathering);
  void end_oldest_unused();

  const std::optional<Secret> secret_;
  const AggregationSession::Report report_;
  const Descriptor listening_;
  const std::string address_;
  EventLoop loop_;
  // Of the loop's thread:
  Callers callers_;               // the oldest first
  Gatherings waiting_, begun_;    // the oldest first
  std::map<std::string, Gatherings::iterator> gatherings_;  // by session
  size_t guests_ = 0;             // connections of those that wait
  EventLoop::Timer pause_{};
  std::list<AggregationSession> sessions_;
};

}  // namespace shoal
