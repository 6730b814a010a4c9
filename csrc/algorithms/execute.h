// Runs a schedule: moves all its bytes and folds what is to be folded.
#pragma once

#include "algorithms/schedule.h"
#include "common/alarm.h"
#include "common/deadline.h"
#include "common/types.h"
#include "transport/link.h"

namespace shoal {

// Returns when every step is complete on this rank: all data has arrived, and the links have taken all data to send.
// All links progress at once. For an `average`, `fold` steps, which have all parts, divide the sum by `divisor`; other
// steps give sums, which the caller divides.
//
// Throws what the alarm holds, Failure(Code::timeout) with the awaited rank, and what the links throw. The links may
// then be in the middle of a step, and cannot be used again.
void execute(const Schedule& schedule, Dtype dtype, Reduction op, const void* input, void* output,
             void* scratch, Links& links, const Alarm& alarm, Deadline deadline, int divisor = 1);

}  // namespace shoal
