#include "transport/process.h"

#include <sys/prctl.h>
#include <unistd.h>
#include <pthread.h>

#include <atomic>
#include <fstream>
#include <sstream>
#include <string>

namespace shoal {

namespace {

std::atomic<unsigned> forks{0};
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });

}  // namespace

unsigned generation() { return forks.load(std::memory_order_relaxed); }

uint64_t start_time_of(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(file, line);
  // The name, in parentheses, may hold anything; after it come fields without spaces, from the third on.
  const size_t end_of_name = line.rfind(')');
  if (end_of_name == std::string::npos) return 0;
  std::istringstream fields(line.substr(end_of_name + 1));
  std::string skipped;
  for (int field = 3; field < 22; ++field) fields >> skipped;
  uint64_t started = 0;
  fields >> started;
  return started;
}

void let_siblings_read() {
  // Refused where there is no such rule, which is as good.
  prctl(PR_SET_PTRACER, getppid(), 0, 0, 0);
}

}  // namespace shoal
