// The link of a rank to the aggregator of its group, made on first use.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/alarm.h"
#include "common/deadline.h"
#include "transport/aggregator_protocol.h"
#include "transport/aggregator_pulse.h"
#include "transport/event_loop.h"
#include "transport/not_inherited.h"
#include "transport/tcp_link.h"

namespace shoal {

class AggregatorLink {
 public:
  // `address`: "address:port". `secret`: that the aggregator asks for, if it does. `greeting`: who this rank is; the stream is set for each connection. `limits`: of its
  // pulse, which the loop watches.
  AggregatorLink(std::string address, const std::optional<Secret>& secret, const Greeting& greeting, EventLoop& loop,
                 AggregatorPulse::Limits limits, const Alarm& alarm);

  // Connects if that has not happened. Waits some seconds for an aggregator that is not there yet.
  // Throws Failure: refused, if none is; timeout, if it does not answer; the alarm's failure.
  Link& connect(Deadline deadline);

  // Such as "the aggregator 192.0.2.1:4100", for errors.
  const std::string& name() const { return name_; }

 private:
  Descriptor connect_stream(int stream, Deadline limit) const;
  bool try_to_connect(Descriptor& socket, Deadline limit, std::string& trouble) const;
  void prove(const Descriptor& socket, Deadline limit) const;
  void await(const Descriptor& socket, short events, Deadline limit) const;
  [[noreturn]] void turned_away(const std::string& question) const;

  const std::string address_, name_;
  const std::optional<Secret> secret_;
  const Greeting greeting_;
  EventLoop& loop_;
  const AggregatorPulse::Limits limits_;
  const Alarm& alarm_;
  std::unique_ptr<TcpLink> link_;
  std::unique_ptr<AggregatorPulse> pulse_;
  std::vector<std::unique_ptr<NotInherited>> guards_;
};

}  // namespace shoal
