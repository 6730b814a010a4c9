// The moment after which an operation has failed.
#pragma once

#include <chrono>

#include "common/error.h"

namespace shoal {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  // The present time, in seconds of the clock of deadlines: the system's monotonic clock.
  static double now() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

  static Deadline after(double seconds) {
    using std::chrono::duration;
    constexpr double year = 3.2e7;  // a longer time is unlimited, and would overflow the clock
    return Deadline(Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                       duration<double>(seconds < year ? seconds : year)));
  }

  bool has_passed() const { return Clock::now() >= moment_; }

  // Seconds that are left; 0 if none.
  double remaining() const {
    const double left = std::chrono::duration<double>(moment_ - Clock::now()).count();
    return left > 0 ? left : 0;
  }

  // Throws Failure(Code::timeout).
  void check(int rank = -1) const {
    if (has_passed()) throw Failure(Code::timeout, rank, "the operation's timeout ran out");
  }

 private:
  explicit Deadline(Clock::time_point moment) : moment_(moment) {}
  Clock::time_point moment_;
};

}  // namespace shoal
