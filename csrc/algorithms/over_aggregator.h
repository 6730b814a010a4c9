// All-reduces by an aggregator, as a rank takes part in them.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "algorithms/hierarchical.h"
#include "algorithms/operation.h"
#include "common/alarm.h"
#include "transport/aggregator_link.h"
#include "transport/link.h"

namespace shoal {

class OverAggregator {
 public:
  // `rank` among those of the hierarchy, as `links` number them. `links` are used between ranks of a host.
  OverAggregator(int rank, Hierarchy hierarchy, Links& links, AggregatorLink& aggregator, const Alarm& alarm)
      : rank_(rank), hierarchy_(std::move(hierarchy)), links_(links), aggregator_(aggregator), alarm_(alarm) {}

  // Runs an all-reduce; `average` divides by `divisor`. Sums of the ranks of a host are of the operation's type.
  void run(const Operation& operation, int divisor);

 private:
  class WithAggregator;  // the links, and after the last rank the aggregator's

  const int rank_;
  const Hierarchy hierarchy_;
  Links& links_;
  AggregatorLink& aggregator_;
  const Alarm& alarm_;
  std::vector<std::byte> scratch_;
};

}  // namespace shoal
