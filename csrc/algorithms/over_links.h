// Whole collectives among ranks that links connect: the work around the execution of a schedule.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "algorithms/hierarchical.h"
#include "algorithms/operation.h"
#include "common/alarm.h"
#include "transport/link.h"

namespace shoal {

class OverLinks {
 public:
  // `rank` among those of the hierarchy, as `links` number them.
  OverLinks(int rank, Hierarchy hierarchy, Links& links, const Alarm& alarm)
      : rank_(rank), size_(hierarchy.ranks()), hierarchy_(std::move(hierarchy)), links_(links), alarm_(alarm) {}

  // Runs the operation. Partial sums of 16-bit floats travel as float32; `average` divides by `divisor`, or by the
  // number of ranks if `divisor` is 0.
  void run(const Operation& operation, int divisor = 0);

 private:
  void run_narrow(const Operation& operation, int divisor);
  void run_as_is(const Operation& operation, int divisor);

  const int rank_, size_;
  const Hierarchy hierarchy_;
  Links& links_;
  const Alarm& alarm_;
  std::vector<std::byte> scratch_;
  std::vector<float> wide_input_, wide_output_;
};

}  // namespace shoal
