// Counts waits while they last: silent peers, or peers that left, are given up only during a wait.
#pragma once

#include <atomic>

namespace shoal {

class Counted {
 public:
  explicit Counted(std::atomic<int>& count) : count_(count) { count_.fetch_add(1); }
  ~Counted() { count_.fetch_sub(1); }
  Counted(const Counted&) = delete;

 private:
  std::atomic<int>& count_;
};

}  // namespace shoal
