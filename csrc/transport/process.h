// What tells one process from another.
#pragma once

#include <sys/types.h>

#include <cstdint>

namespace shoal {

// When a process started, in the system's ticks since boot (field 22 of /proc/PID/stat); 0 if it is not known.
// A number of a process that ended is given to a new one some day; the two differ in this.
uint64_t start_time_of(pid_t pid);

}  // namespace shoal
