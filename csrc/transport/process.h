// Identity, ancestors and end of processes.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <vector>

namespace shoal {

// When a process started, in the system's ticks since boot (field 22 of /proc/PID/stat); 0 if it is not known. The
// number of an ended process is used again later; the start times then differ.
uint64_t start_time_of(pid_t pid);

// How many forks lie between the process that loaded this library and this one. Cheaper than getpid.
unsigned generation();

// Whether a process has ended, even if its parent has not waited for it.
bool has_ended(pid_t pid);

// The nearest common ancestor of these processes, which may be one of them; 0 if it is PID 1. Ended processes do not
// count.
pid_t nearest_ancestor(const std::vector<pid_t>& processes);

}  // namespace shoal
