#include "transport/process.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <fstream>
#include <sstream>
#include <string>

namespace shoal {

namespace {

std::atomic<unsigned> forks{0};
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });

// A field of /proc/PID/stat, counted from 1, from the third on; empty if there is no such process.
std::string field_of(pid_t pid, int number) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(file, line);
  // The name, in parentheses, may hold anything; after it come fields without spaces.
  const size_t end_of_name = line.rfind(')');
  if (end_of_name == std::string::npos) return "";
  std::istringstream fields(line.substr(end_of_name + 1));
  std::string found;
  for (int field = 3; field <= number; ++field) fields >> found;
  return found;
}

uint64_t number_in(const std::string& text) { return text.empty() ? 0 : std::stoull(text); }

// 0 if there is no such process.
pid_t parent_of(pid_t pid) { return static_cast<pid_t>(number_in(field_of(pid, 4))); }

}  // namespace

unsigned generation() { return forks.load(std::memory_order_relaxed); }

uint64_t start_time_of(pid_t pid) { return number_in(field_of(pid, 22)); }

bool has_ended(pid_t pid) {
  if (kill(pid, 0) != 0 && errno == ESRCH) return true;
  const std::string state = field_of(pid, 3);
  return state == "Z" || state == "X";
}

pid_t nearest_ancestor(const std::vector<pid_t>& processes) {
  std::vector<pid_t> line;  // common ancestors so far, the nearest first
  bool is_first = true;
  for (const pid_t process : processes) {
    if (has_ended(process)) continue;
    if (is_first) {
      for (pid_t each = process; each > 1; each = parent_of(each)) line.push_back(each);
      is_first = false;
      continue;
    }
    auto shared = line.end();
    for (pid_t each = process; each > 1 && shared == line.end(); each = parent_of(each)) {
      shared = std::find(line.begin(), line.end(), each);
    }
    line.erase(line.begin(), shared);
  }
  return line.empty() ? 0 : line.front();
}

}  // namespace shoal
