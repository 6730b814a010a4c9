// The messages and bytes of a schedule, for tests and for whoever wants to compare costs.
#pragma once

#include <cstddef>
#include <map>

#include "algorithms/schedule.h"

namespace shoal {

struct Traffic {
  size_t messages = 0;  // steps: what is cut into chunks counts once per chunk
  size_t bytes = 0;

  bool operator==(const Traffic&) const = default;
};

struct Count {
  std::map<int, Traffic> sent;      // by peer
  std::map<int, Traffic> received;  // by peer

  Traffic all_sent() const;
  Traffic all_received() const;
};

Count count(const Schedule& schedule);

}  // namespace shoal
