// Notices that an aggregator has ended or stopped, while a rank uses it.
//
// Data comes only when all hosts have sent theirs, so silence there means nothing. On a connection of its own the
// aggregator gives signs of life, as ranks of other hosts do on their control connections.
#pragma once

#include <functional>
#include <string>

#include "common/error.h"
#include "transport/descriptor.h"
#include "transport/event_loop.h"
#include "transport/not_inherited.h"

namespace shoal {

class AggregatorPulse {
 public:
  struct Limits {
    double silence = 5;                        // seconds without a sign of life, while an operation waits
    std::function<bool()> is_waited_for;       // whether an operation waits
    std::function<void(Code, const std::string&)> tell;  // gives the group up
  };

  // `name`: the aggregator's, for errors. The functions of `limits` are called on the loop's thread.
  AggregatorPulse(EventLoop& loop, Descriptor socket, std::string name, Limits limits);
  ~AggregatorPulse();  // none of them is called any more

 private:
  using Time = EventLoop::Clock::time_point;

  void take();
  void judge();

  EventLoop& loop_;
  const Descriptor socket_;
  const NotInherited guard_;
  const std::string name_;
  const Limits limits_;
  // Of the loop's thread:
  Time last_sign_ = EventLoop::Clock::now(), last_look_ = last_sign_;
  EventLoop::Timer next_look_{};
  bool has_ended_ = false;
};

// What to do about an aggregator that fails.
std::string aggregator_advice();

}  // namespace shoal
