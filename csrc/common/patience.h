// How a thread waits for another process: it spins while an answer is likely within microseconds, then lets
// others run, then sleeps until it is woken.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <ctime>

#include "common/alarm.h"
#include "common/deadline.h"
#include "common/interruption.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace shoal {

inline void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A number that grows, in memory that other processes map, and that they may sleep on.
struct alignas(64) Flag {
  std::atomic<uint32_t> value{0};
  std::atomic<uint32_t> sleepers{0};
  // Two words, for even and for odd values. They are in the value's cache line, so reading them too costs nothing. The
  // writer stores a value's word before the value.
  uint64_t words[2] = {0, 0};

  void set(uint32_t to) {
    value.store(to, std::memory_order_seq_cst);
    // A sleeper that counts itself in after this load checks the value later, and sees the new one.
    if (sleepers.load(std::memory_order_seq_cst) != 0) wake();
  }

  void wake() { syscall(SYS_futex, &value, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0); }

  // Sleeps while the value is `seen`, at most `seconds`.
  void sleep(uint32_t seen, double seconds) {
    const auto whole = static_cast<time_t>(seconds);
    const timespec limit{whole, static_cast<long>((seconds - static_cast<double>(whole)) * 1e9)};
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    if (value.load(std::memory_order_seq_cst) == seen) {
      syscall(SYS_futex, &value, FUTEX_WAIT, seen, &limit, nullptr, 0);
    }
    sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }
};

struct Patience {
  int spins = 2000;  // checks with a pause in between: some tens of microseconds
  int yields = 50;   // checks after letting others run

  // Returns when `ready(value)` holds for the flag's value. Throws the alarm's failure, a timeout, or Interrupted.
  template <class Ready>
  void await(Flag& flag, const Ready& ready, const Alarm& alarm, const Deadline& deadline, int rank) const {
    for (int spin = 0; spin < spins; ++spin) {
      if (ready(flag.value.load(std::memory_order_acquire))) return;
      pause_briefly();
    }
    for (int yield = 0; yield < yields; ++yield) {
      if (ready(flag.value.load(std::memory_order_acquire))) return;
      sched_yield();
    }
    constexpr double slice = 0.005;  // after this time an alarm is seen that did not wake the thread
    for (;;) {
      const uint32_t seen = flag.value.load(std::memory_order_acquire);
      if (ready(seen)) return;
      alarm.check();
      deadline.check(rank);
      run_signal_handlers();
      flag.sleep(seen, slice);
    }
  }
};

}  // namespace shoal
