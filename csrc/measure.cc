#include "measure.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

namespace shoal {

namespace {

bool pin(int core) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(static_cast<size_t>(core), &cores);
  return pthread_setaffinity_np(pthread_self(), sizeof cores, &cores) == 0;
}

// Raises the flag to every second number, each time after the other thread has raised it to the number before.
void take_turns(std::atomic<int>& flag, int first, int last) {
  for (int turn = first; turn < last; turn += 2) {
    while (flag.load(std::memory_order_acquire) != turn) {
    }
    flag.store(turn + 1, std::memory_order_release);
  }
}

}  // namespace

double flag_latency(int core, int other) {
  constexpr int batches = 101, turns_per_batch = 2000;
  alignas(64) std::atomic<int> flag{0};
  std::atomic<int> pinned{0};  // how many threads run on their cores; negative: one cannot
  std::vector<double> nanoseconds;
  const auto go = [&](int where, int first) {
    if (!pin(where)) pinned = -100;
    ++pinned;
    while (pinned < 2) {
      if (pinned < 0) return;
      std::this_thread::yield();
    }
    for (int batch = 0; batch < batches; ++batch) {
      const auto begin = std::chrono::steady_clock::now();
      take_turns(flag, batch * turns_per_batch + first, (batch + 1) * turns_per_batch);
      const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
      if (first == 0) nanoseconds.push_back(took.count() / turns_per_batch);
    }
  };
  if (core == other) return -1;
  // Separate threads: the caller's affinity stays unchanged.
  std::thread one(go, core, 0), two(go, other, 1);
  one.join();
  two.join();
  if (pinned < 0) return -1;
  std::nth_element(nanoseconds.begin(), nanoseconds.begin() + batches / 2, nanoseconds.end());
  return nanoseconds[batches / 2];
}

}  // namespace shoal
