// All-reduce by an aggregator, a process that stands where the switch is: every host sends its data up once and gets
// the sum back, as in networks whose switches add up (SHARP).
#pragma once

#include "algorithms/hierarchical.h"
#include "algorithms/schedule.h"

namespace shoal {

// The steps of a rank, in place in the output. To the schedule the aggregator is the peer `hierarchy.ranks()`.
void add_in_network_all_reduce(Schedule& schedule, const Hierarchy& hierarchy, int rank, size_t bytes, size_t element,
                               size_t chunk);

// The steps of the aggregator for one slice of `bytes`: its peers are the hosts. The output has room for
// `aggregation_windows` chunks, and scratch, from `scratch_offset` on, for as many of every host.
void add_aggregation(Schedule& schedule, int hosts, size_t bytes, size_t element, size_t chunk, size_t scratch_offset);

constexpr int aggregation_windows = 16;

// The bytes of the slice that this rank sends to the aggregator; 0 if it has none.
size_t aggregated_bytes(const Hierarchy& hierarchy, int rank, size_t bytes, size_t element);

}  // namespace shoal
