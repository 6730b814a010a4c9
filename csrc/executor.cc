#include "executor.h"

#include <algorithm>

#include "common/interruption.h"
#include "common/quiet_thread.h"

namespace shoal {

namespace {

// Seconds after which a thread that waits for another one checks for signals.
constexpr double longest_sleep = 0.1;

}  // namespace

Executor::~Executor() {
  {
    std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

std::unique_lock<std::mutex> Executor::try_idle() {
  std::unique_lock lock(mutex_);
  if (running_ || !queue_.empty()) lock.unlock();
  return lock;
}

void Executor::enqueue(std::shared_ptr<Task> task, std::unique_lock<std::mutex> idle) {
  if (!idle) idle = std::unique_lock(mutex_);
  queue_.push_back(std::move(task));
}

void Executor::start_background() {
  {
    std::lock_guard lock(mutex_);
    wanted_ = true;
    if (!thread_.joinable()) thread_ = start_quiet_thread([this] { run_background(); });
  }
  changed_.notify_all();
}

void Executor::wait(Task& task) {
  std::unique_lock lock(mutex_);
  while (!task.done.load(std::memory_order_acquire)) {
    if (!running_) {
      run_front(lock, false);
    } else {
      sleep(lock, longest_sleep);
    }
  }
  if (task.failure) std::rethrow_exception(task.failure);
}

void Executor::settle() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !running_ || runner_ == std::this_thread::get_id(); });
}

bool Executor::wait_until(Task& task, Deadline limit) {
  start_background();
  std::unique_lock lock(mutex_);
  while (!task.done.load(std::memory_order_acquire)) {
    if (limit.has_passed()) return false;
    sleep(lock, std::min(longest_sleep, limit.remaining()));
  }
  if (task.failure) std::rethrow_exception(task.failure);
  return true;
}

// Sleeps until something changed. Releases the lock meanwhile.
void Executor::sleep(std::unique_lock<std::mutex>& lock, double seconds) {
  changed_.wait_for(lock, std::chrono::duration<double>(seconds));
  lock.unlock();
  run_signal_handlers();
  lock.lock();
}

// Releases the lock while the task runs.
void Executor::run_front(std::unique_lock<std::mutex>& lock, bool is_background) {
  const std::shared_ptr<Task> task = queue_.front();
  queue_.pop_front();
  running_ = true;
  runner_ = std::this_thread::get_id();
  lock.unlock();
  try {
    run_(*task, is_background);
  } catch (...) {
    task->failure = std::current_exception();
  }
  task->finished = Deadline::now();
  lock.lock();
  running_ = false;
  task->done.store(true, std::memory_order_release);
  changed_.notify_all();
}

void Executor::run_background() {
  std::unique_lock lock(mutex_);
  while (!stopped_) {
    if (wanted_ && !running_ && !queue_.empty()) {
      run_front(lock, true);
      if (queue_.empty()) wanted_ = false;
    } else {
      changed_.wait(lock);
    }
  }
}

}  // namespace shoal
