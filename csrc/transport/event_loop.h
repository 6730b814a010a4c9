// One thread that calls back when a descriptor is ready or a moment has come.
//
// What a callback touches belongs to the loop's thread: it needs no lock. Other threads hand work to it with
// `post` and `call`. In a process that was forked off, which has no such thread, all of this does nothing:
// the descriptors' registration is shared with the parent, and must be left alone.
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

  // Runs what was posted before, and ends the thread.
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

  // The same, and returns when it has run. Where there is no thread, or it is this one, it runs at once.
  void call(const std::function<void()>& work);

 private:
  bool is_here() const { return getpid() == process_; }  // in the process that made it
  void run();
  void run_posted();
  void run_timers();
  int milliseconds_to_next_timer() const;

  const pid_t process_;
  Descriptor epoll_, wake_;
  // A descriptor that was closed comes again as another's; a registration's number does not.
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
