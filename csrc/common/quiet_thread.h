// Threads of the core's own.
#pragma once

#include <signal.h>

#include <thread>
#include <utility>

namespace shoal {

// A thread that runs `work` and that no signal is given to: signals are for the threads of the application.
template <class Work>
std::thread start_quiet_thread(Work&& work) {
  struct Blocked {  // until the thread has inherited it, or could not be started
    Blocked() {
      sigset_t all;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);
    }
    ~Blocked() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
    sigset_t before;
  } blocked;
  return std::thread(std::forward<Work>(work));
}

}  // namespace shoal
