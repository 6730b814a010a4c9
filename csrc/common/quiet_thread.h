// Threads of the core.
#pragma once

#include <signal.h>

#include <thread>
#include <utility>

namespace shoal {

// A thread that runs `work` and receives no signals: these are for the threads of the application.
template <class Work>
std::thread start_quiet_thread(Work&& work) {
  struct Blocked {  // until the thread has inherited the mask, or did not start
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
