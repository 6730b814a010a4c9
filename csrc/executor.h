// The collectives of one group, one after the other, in the order in which they were called.
//
// Who waits for an operation runs it, and what was called before it, in his own thread; what nobody waits
// for yet is run by a thread of the executor, so that communication goes on under computation.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "algorithms/operation.h"

namespace shoal {

struct Task {
  Operation operation;
  bool begun = false;  // its first half, which does not wait, was done
  double finished = 0;  // when it was done, in seconds of the monotonic clock
  std::atomic<bool> done{false};
  std::exception_ptr failure;  // read after `done`
};

class Executor {
 public:
  // `run` does what is left of a task; `is_background` says that it is the executor's own thread that does.
  explicit Executor(std::function<void(Task&, bool is_background)> run) : run_(std::move(run)) {}
  ~Executor();

  // Holds the executor while nothing else runs or is queued; empty if something does.
  std::unique_lock<std::mutex> try_idle();

  // Adds a task; `idle` is what `try_idle` gave, and is let go.
  void enqueue(std::shared_ptr<Task> task, std::unique_lock<std::mutex> idle);

  // Has the executor's thread run what is queued.
  void start_background();

  // Returns when the task is done; throws what went wrong in it, or Interrupted.
  void wait(Task& task);

  // Returns when no other thread runs a task; after the alarm, which ends those that run. Who calls it may be within a
  // task of his own, which a signal interrupted.
  void settle();

  // Returns then at the latest: false if the task is not done. It is left to the executor's thread.
  bool wait_until(Task& task, Deadline limit);

 private:
  void run_front(std::unique_lock<std::mutex>& lock, bool is_background);
  void sleep(std::unique_lock<std::mutex>& lock, double seconds);
  void run_background();

  std::function<void(Task&, bool)> run_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Task>> queue_;
  bool running_ = false;
  std::thread::id runner_;  // while it is running
  bool wanted_ = false;  // the background thread is to run what is queued
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace shoal
