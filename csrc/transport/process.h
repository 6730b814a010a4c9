// What tells one process from another, and what one may see of another.
#pragma once

#include <sys/types.h>

#include <cstdint>

namespace shoal {

// When a process started, in the system's ticks since boot (field 22 of /proc/PID/stat); 0 if it is not
// known. A number of a process that ended is given to a new one some day; the two differ in this.
uint64_t start_time_of(pid_t pid);

// How many forks lie between the process that loaded this library and this one. Cheaper than getpid.
unsigned generation();

// Lets the processes that this one's parent started read its memory, where the system's rule is that only a
// process's own ancestors may (Yama, ptrace_scope 1): the ranks of a launcher are siblings.
void let_siblings_read();

}  // namespace shoal
