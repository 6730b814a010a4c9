// Runs a schedule: moves all its bytes and folds what is to be folded.
#pragma once

#include "algorithms/schedule.h"
#include "common/alarm.h"
#include "common/deadline.h"
#include "common/types.h"
#include "transport/link.h"

namespace shoal {

// Returns when every step is complete on this rank: everything that is to come has come, and the links have
// taken what is to go. All links progress at once. Of an `average`, `fold` steps, which have
// all parts, give the sum over `divisor`; other reductions are sums, which the caller divides.
//
// Throws what the alarm holds, Failure(Code::timeout) with the rank that is waited for, and what the links
// throw. The links are then somewhere within a step, and of no more use.
void execute(const Schedule& schedule, Dtype dtype, Reduction op, const void* input, void* output,
             void* scratch, Links& links, const Alarm& alarm, Deadline deadline, int divisor = 1);

}  // namespace shoal
