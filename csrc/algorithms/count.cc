#include "algorithms/count.h"

namespace shoal {

namespace {

void add(Traffic& traffic, const Traffic& more) {
  traffic.messages += more.messages;
  traffic.bytes += more.bytes;
}

Traffic sum(const std::map<int, Traffic>& by_peer) {
  Traffic total;
  for (const auto& [peer, traffic] : by_peer) add(total, traffic);
  return total;
}

}  // namespace

Traffic Count::all_sent() const { return sum(sent); }

Traffic Count::all_received() const { return sum(received); }

Count count(const Schedule& schedule) {
  Count count;
  for (const Step& step : schedule.steps) {
    if (step.peer < 0) continue;
    auto& by_peer = step.kind == Step::Kind::send ? count.sent : count.received;
    add(by_peer[step.peer], {1, step.region.bytes});
  }
  return count;
}

}  // namespace shoal
