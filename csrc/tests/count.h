// The messages and bytes of a schedule.
#pragma once

#include <cstddef>
#include <map>

#include "algorithms/schedule.h"

namespace shoal {

struct Traffic {
  size_t messages = 0;  // steps: a region in chunks counts once per chunk
  size_t bytes = 0;

  bool operator==(const Traffic&) const = default;
};

struct Count {
  std::map<int, Traffic> sent;      // by peer
  std::map<int, Traffic> received;  // by peer

  Traffic all_sent() const { return sum(sent); }
  Traffic all_received() const { return sum(received); }

 private:
  static Traffic sum(const std::map<int, Traffic>& by_peer) {
    Traffic total;
    for (const auto& [peer, traffic] : by_peer) {
      total.messages += traffic.messages;
      total.bytes += traffic.bytes;
    }
    return total;
  }
};

inline Count count(const Schedule& schedule) {
  Count count;
  for (const Step& step : schedule.steps) {
    if (step.peer < 0) continue;
    Traffic& traffic = (step.kind == Step::Kind::send ? count.sent : count.received)[step.peer];
    ++traffic.messages;
    traffic.bytes += step.region.bytes;
  }
  return count;
}

}  // namespace shoal
