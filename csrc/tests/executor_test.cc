#include "executor.h"

#include <chrono>
#include <vector>

#include "tests/check.h"

using namespace shoal;

namespace {

std::shared_ptr<Task> task_of(int number) {
  auto task = std::make_shared<Task>();
  task->operation.root = number;
  return task;
}

void add(Executor& executor, const std::shared_ptr<Task>& task) {
  executor.enqueue(task, executor.try_idle());
}

void tasks_run_in_order_whoever_waits_for_which() {
  std::vector<int> order;  // guarded by the executor: one task runs at a time
  Executor executor([&](Task& task, bool) { order.push_back(task.operation.root); });
  std::vector<std::shared_ptr<Task>> tasks;
  for (int number = 0; number < 200; ++number) {
    tasks.push_back(task_of(number));
    add(executor, tasks.back());
    if (number % 5 == 0) executor.start_background();
  }
  std::vector<std::thread> waiters;
  for (int waiter = 0; waiter < 4; ++waiter) {
    waiters.emplace_back([&, waiter] {
      for (int number = 199 - waiter; number >= 0; number -= 4) {
        executor.wait(*tasks[static_cast<size_t>(number)]);
      }
    });
  }
  for (std::thread& waiter : waiters) waiter.join();
  CHECK_EQUAL(order.size(), 200u);
  CHECK(std::is_sorted(order.begin(), order.end()));
}

void who_waits_runs_what_was_called_before() {
  const auto caller = std::this_thread::get_id();
  std::vector<int> order;
  Executor executor([&](Task& task, bool is_background) {
    CHECK(!is_background);
    CHECK(std::this_thread::get_id() == caller);
    order.push_back(task.operation.root);
  });
  const auto first = task_of(1), second = task_of(2), third = task_of(3);
  add(executor, first);
  add(executor, second);
  add(executor, third);
  executor.wait(*second);
  CHECK(order == (std::vector<int>{1, 2}));
  CHECK(first->done && !third->done);
}

void the_background_runs_what_nobody_waits_for() {
  std::atomic<int> ran{0};
  Executor executor([&](Task&, bool is_background) {
    CHECK(is_background);
    ++ran;
  });
  for (int number = 0; number < 3; ++number) add(executor, task_of(number));
  executor.start_background();
  while (ran < 3) std::this_thread::yield();
}

void a_failure_reaches_everybody_who_waits_and_no_other_task() {
  Executor executor([](Task& task, bool) {
    if (task.operation.root == 1) throw Failure(Code::peer_lost, 7, "gone");
  });
  const auto good = task_of(0), bad = task_of(1), after = task_of(2);
  for (const auto& task : {good, bad, after}) add(executor, task);
  executor.start_background();
  std::vector<std::thread> waiters;
  for (int waiter = 0; waiter < 3; ++waiter) {
    waiters.emplace_back([&] { CHECK_THROWS(executor.wait(*bad), Code::peer_lost); });
  }
  for (std::thread& waiter : waiters) waiter.join();
  executor.wait(*good);
  executor.wait(*after);
}

void it_is_idle_only_while_nothing_is_queued_or_runs() {
  std::atomic<bool> may_end{false}, has_begun{false};
  Executor executor([&](Task&, bool) {
    has_begun = true;
    while (!may_end) std::this_thread::yield();
  });
  CHECK(executor.try_idle().owns_lock());
  const auto task = task_of(0);
  add(executor, task);
  CHECK(!executor.try_idle().owns_lock());
  executor.start_background();
  while (!has_begun) std::this_thread::yield();
  CHECK(!executor.try_idle().owns_lock());
  may_end = true;
  executor.wait(*task);
  CHECK(executor.try_idle().owns_lock());
}

void it_can_be_destroyed_with_tasks_left() {
  const auto task = task_of(0);
  {
    Executor executor([](Task&, bool) {});
    add(executor, task);
  }
  {
    Executor executor([](Task&, bool) {});
    for (int number = 0; number < 100; ++number) add(executor, task_of(number));
    executor.start_background();
  }
  CHECK(!task->done);
}

}  // namespace

int main() {
  for (int round = 0; round < 20; ++round) tasks_run_in_order_whoever_waits_for_which();
  who_waits_runs_what_was_called_before();
  the_background_runs_what_nobody_waits_for();
  for (int round = 0; round < 20; ++round) a_failure_reaches_everybody_who_waits_and_no_other_task();
  it_is_idle_only_while_nothing_is_queued_or_runs();
  it_can_be_destroyed_with_tasks_left();
  return report();
}
