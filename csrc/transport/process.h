// What tells one process from another, and what one may see of another.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <vector>

namespace shoal {

// When a process started, in the system's ticks since boot (field 22 of /proc/PID/stat); 0 if it is not
// known. A number of a process that ended is given to a new one some day; the two differ in this.
uint64_t start_time_of(pid_t pid);

// How many forks lie between the process that loaded this library and this one. Cheaper than getpid.
unsigned generation();

// Whether a process is there no more, or is only waited for by its parent.
bool has_ended(pid_t pid);

// The process that has all of these among its descendants, itself included, and is the nearest to them; 0 if there is
// none but PID 1. Processes that ended do not count.
pid_t nearest_ancestor(const std::vector<pid_t>& processes);

}  // namespace shoal
