// The cores that a process may use, and what limits and caches come with them.
#pragma once

#include <array>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "common/patience.h"

namespace shoal {

// The cores of one process. It has no pointers, so that processes can pass it in shared memory.
struct Cores {
  static constexpr size_t most = 1024;  // cores; on a larger machine only the first ones count

  std::bitset<most> allowed;      // to the process, by sched_setaffinity or a cpuset
  std::bitset<most> cache_heads;  // for each last-level cache of these cores, its core with the lowest number
  uint64_t cache_bytes = 0;       // in one of these caches; 0: the system does not say
  uint64_t quota_group = 0;       // the control group with the tightest limit of CPU time; 0: none has one
  double quota = 0;               // that limit, in cores
};

// Returns the cores of the calling process. `root` is where /proc and /sys are, for tests.
Cores find_cores(const std::string& root = "");

// How many of the processes can run at once, each on its own core, within the limits of CPU time. If this is less than
// the number of processes, some must wait for others.
int count_running(const std::vector<Cores>& processes);

// How many of the processes take turns on a core: 1 if each has its own core.
int turns_on_a_core(const std::vector<Cores>& processes);

// Bytes of last-level cache for each process, if the processes share their caches evenly. All processes with the same
// input get the same result.
size_t cache_share(const std::vector<Cores>& processes);

// How processes that run on these cores wait for each other. In the background, the application computes meanwhile.
Patience patience_for(const std::vector<Cores>& processes, bool is_background);

}  // namespace shoal
