// How a rank waits for its links: the longer nothing moves, the less often it checks.
#pragma once

#include <poll.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <vector>

#include "common/patience.h"

namespace shoal {

class Waiting {
 public:
  // Something moved.
  void restart() { is_waiting_ = false; }

  // Nothing moved. True when it is time to sleep; before that it spins, and then lets others run.
  bool has_lasted() {
    const auto now = Clock::now();
    if (!is_waiting_) since_ = now;
    is_waiting_ = true;
    if (now - since_ < spinning) {
      pause_briefly();
      return false;
    }
    if (now - since_ < yielding) {
      sched_yield();
      return false;
    }
    return true;
  }

  // Sleeps until one of the descriptors is ready, but not for long: links without a descriptor and the alarm must be
  // checked. `all`: every awaited link has a descriptor.
  void sleep(std::vector<pollfd>& descriptors, bool all) const {
    using std::chrono::nanoseconds;
    const nanoseconds limit =
        all ? longest_sleep : std::clamp<nanoseconds>((Clock::now() - since_) / 8, shortest_nap, longest_nap);
    const timespec time{0, static_cast<long>(limit.count())};
    ppoll(descriptors.data(), descriptors.size(), &time, nullptr);
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::microseconds spinning{20}, yielding{100}, shortest_nap{20}, longest_nap{100};
  static constexpr std::chrono::milliseconds longest_sleep{5};

  bool is_waiting_ = false;
  Clock::time_point since_;
};

}  // namespace shoal
