// The collectives of one group, one after the other, in the order in which they were called.
//
// A thread that waits for an operation runs it, and all operations called before it. A thread of the executor runs
// operations for which no thread waits yet, so that communication overlaps computation.
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
  // `run` does the rest of a task; `is_background` says that the executor's own thread runs it.
  explicit Executor(std::function<void(Task&, bool is_background)> run) : run_(std::move(run)) {}
  ~Executor();

  // Holds the executor while nothing else runs or is queued; empty if something does.
  std::unique_lock<std::mutex> try_idle();

  // Adds a task; `idle` is the result of `try_idle`, and is released.
  void enqueue(std::shared_ptr<Task> task, std::unique_lock<std::mutex> idle);

  // Lets the executor's thread run the queued tasks.
  void start_background();

  // Returns when the task is done; throws its error, or Interrupted.
  void wait(Task& task);

  // Returns when no other thread runs a task. Call it after the alarm, which ends running tasks. The caller may be
  // inside a task of its own that a signal interrupted.
  void settle();

  // Returns at `limit` at the latest: false if the task is not done. The executor's thread then continues it.
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
  bool wanted_ = false;  // the background thread should run the queued tasks
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace shoal
