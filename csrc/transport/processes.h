// The processes of this host that ranks of this process's groups are in, each watched once, through a pidfd, which
// becomes readable when the process ends.
//
// All functions run on the loop's thread.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <utility>

#include "transport/descriptor.h"
#include "transport/event_loop.h"

namespace shoal {

class Processes {
 public:
  // The watcher of a process; 0: none.
  using Watcher = uint64_t;

  explicit Processes(EventLoop& loop) : loop_(loop) {}
  ~Processes();

  enum class Sight {
    watched,
    ended,    // it does not exist, or a process that started later has its number
    unknown,  // the system has no pidfd, or no descriptor is left: the caller must check for its end
  };

  // Calls `on_end` once when the process ends. `started`: see start_time_of; 0: not known.
  Sight watch(pid_t pid, uint64_t started, std::function<void()> on_end, Watcher& watcher);
  void forget(pid_t pid, Watcher watcher);

 private:
  struct Process {
    Descriptor descriptor;
    std::map<Watcher, std::function<void()>> watchers;
  };

  void ended(pid_t pid);

  EventLoop& loop_;
  std::map<pid_t, Process> processes_;
  Watcher last_ = 0;
};

}  // namespace shoal
