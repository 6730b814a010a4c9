// Facts about the machine for benchmarks.
#pragma once

namespace shoal {

// The time, in nanoseconds, until a flag that is raised on one core is seen on another: the median over
// batches of turns between two threads. Negative if there are no two such cores to run on.
double flag_latency(int core, int other);

}  // namespace shoal
