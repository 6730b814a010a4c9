#include "transport/event_loop.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <array>
#include <cerrno>
#include <future>

#include "common/error.h"
#include "common/quiet_thread.h"

namespace shoal {

EventLoop::EventLoop() : process_(getpid()) {}

EventLoop::~EventLoop() { stop(); }

void EventLoop::start() {
  std::lock_guard lock(starting_);
  if (has_thread_) return;
  epoll_ = Descriptor(epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_) throw system_failure("epoll_create1", errno);
  wake_ = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_) throw system_failure("eventfd", errno);
  add(wake_.number(), EPOLLIN, [this](uint32_t) {
    uint64_t count;
    if (read(wake_.number(), &count, sizeof count) < 0) return;  // there is nothing to take
  });

  thread_ = start_quiet_thread([this] { run(); });
  pthread_setname_np(thread_.native_handle(), "shoal-watch");
  has_thread_ = true;
}

void EventLoop::stop() {
  if (!thread_.joinable()) return;
  if (!is_here()) return thread_.detach();
  post([this] { stopping_ = true; });
  thread_.join();
  has_thread_ = false;
}

void EventLoop::add(int descriptor, uint32_t events, std::function<void(uint32_t)> callback) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = next_number_++;
  if (epoll_ctl(epoll_.number(), EPOLL_CTL_ADD, descriptor, &event) != 0) {
    throw system_failure("epoll_ctl", errno);
  }
  number_of_[descriptor] = event.data.u64;
  callbacks_[event.data.u64] = std::make_shared<std::function<void(uint32_t)>>(std::move(callback));
}

void EventLoop::change(int descriptor, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = number_of_.at(descriptor);
  epoll_ctl(epoll_.number(), EPOLL_CTL_MOD, descriptor, &event);
}

void EventLoop::remove(int descriptor) {
  const auto found = number_of_.find(descriptor);
  if (found == number_of_.end() || !is_here()) return;
  epoll_ctl(epoll_.number(), EPOLL_CTL_DEL, descriptor, nullptr);
  callbacks_.erase(found->second);
  number_of_.erase(found);
}

EventLoop::Timer EventLoop::after(double seconds, std::function<void()> callback) {
  const auto delay = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  const Timer timer{Clock::now() + delay, next_number_++};
  timers_[timer] = std::move(callback);
  return timer;
}

void EventLoop::post(std::function<void()> work) {
  if (!is_here()) return;
  {
    std::lock_guard lock(mutex_);
    posted_.push_back(std::move(work));
  }
  const uint64_t one = 1;
  if (write(wake_.number(), &one, sizeof one) < 0) return;  // it is full: the loop is awake anyway
}

void EventLoop::call(const std::function<void()>& work) {
  if (!is_here()) return;
  if (!has_thread_ || std::this_thread::get_id() == thread_.get_id()) return work();
  std::promise<void> done;
  post([&] {
    try {
      work();
      done.set_value();
    } catch (...) {
      done.set_exception(std::current_exception());
    }
  });
  done.get_future().get();
}

void EventLoop::run() {
  std::array<epoll_event, 64> events;
  while (!stopping_) {
    const int count = epoll_wait(epoll_.number(), events.data(), events.size(), milliseconds_to_next_timer());
    for (int i = 0; i < count; ++i) {
      const epoll_event& event = events[static_cast<size_t>(i)];
      const auto found = callbacks_.find(event.data.u64);
      if (found == callbacks_.end()) continue;  // an earlier callback of this round removed it
      const auto callback = found->second;      // it may remove itself
      (*callback)(event.events);
    }
    run_timers();
    run_posted();
  }
}

void EventLoop::run_posted() {
  std::vector<std::function<void()>> work;
  {
    std::lock_guard lock(mutex_);
    work.swap(posted_);
  }
  for (const auto& each : work) each();
}

void EventLoop::run_timers() {
  const auto now = Clock::now();
  while (!timers_.empty() && timers_.begin()->first.first <= now) {
    const auto due = timers_.extract(timers_.begin());
    due.mapped()();
  }
}

int EventLoop::milliseconds_to_next_timer() const {
  if (timers_.empty()) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(timers_.begin()->first.first - Clock::now());
  return left.count() > 0 ? static_cast<int>(left.count()) : 0;
}

}  // namespace shoal
