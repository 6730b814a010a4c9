// One thread that calls back when a descriptor is ready or a moment has come.
//
// State that callbacks touch belongs to the loop's thread and needs no lock. Other threads hand work to it with `post`
// and `call`. A forked process has no such thread, and all functions do nothing there: the registration of descriptors
// is shared with the parent and must not change.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "transport/descriptor.h"

namespace shoal {

class EventLoop {
 public:
  using Clock = std::chrono::steady_clock;
  using Timer = std::pair<Clock::time_point, uint64_t>;

  EventLoop();
  ~EventLoop();  // as `stop`

  // Starts the thread, unless it runs. It blocks all signals, which are the application's. From any thread.
  void start();

  // Runs the posted work, and ends the thread.
  void stop();

  // --- on the loop's thread, or while there is none ---

  // Calls back with the events (EPOLLIN, ...) whenever there are any. A callback may remove itself.
  // The descriptor has to be removed before it is closed.
  void add(int descriptor, uint32_t events, std::function<void(uint32_t)> callback);
  void change(int descriptor, uint32_t events);
  void remove(int descriptor);

  // Calls back once.
  Timer after(double seconds, std::function<void()> callback);
  void cancel(Timer timer) { timers_.erase(timer); }

  // --- from any thread ---

  // Runs `work` on the loop's thread, soon.
  void post(std::function<void()> work);

  // As `post`, but returns when `work` has run. Without a thread, or on the loop's thread, it runs at once.
  void call(const std::function<void()>& work);

 private:
  bool is_here() const { return getpid() == process_; }  // in the process that made the loop
  void run();
  void run_posted();
  void run_timers();
  int milliseconds_to_next_timer() const;

  const pid_t process_;
  Descriptor epoll_, wake_;
  // The number of a closed descriptor is used again; the number of a registration is not.
  uint64_t next_number_ = 1;
  std::unordered_map<int, uint64_t> number_of_;
  std::unordered_map<uint64_t, std::shared_ptr<std::function<void(uint32_t)>>> callbacks_;
  std::map<Timer, std::function<void()>> timers_;
  std::atomic<bool> has_thread_{false};  // set once `thread_` is
  bool stopping_ = false;

  std::mutex starting_;
  std::mutex mutex_;
  std::vector<std::function<void()>> posted_;
  std::thread thread_;
};

}  // namespace shoal
