#include "common/cores.h"

#include <sched.h>
#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>

namespace shoal {

namespace {

using std::filesystem::path;

// If the system does not say: roughly the cache of a server processor.
constexpr uint64_t usual_cache_bytes = 32 << 20;

std::string first_line(const path& file) {
  std::string line;
  std::ifstream stream(file);
  std::getline(stream, line);
  return line;
}

std::bitset<Cores::most> allowed_cores() {
  std::bitset<Cores::most> allowed;
  // The kernel refuses a set that is smaller than its own.
  for (size_t bytes = 1024 / 8; bytes <= 65536 / 8; bytes *= 2) {
    std::vector<unsigned long> words(bytes / sizeof(unsigned long));
    if (sched_getaffinity(0, bytes, reinterpret_cast<cpu_set_t*>(words.data())) != 0) continue;
    for (size_t core = 0; core < Cores::most; ++core) {
      constexpr size_t bits = 8 * sizeof(unsigned long);
      allowed[core] = (words[core / bits] >> core % bits & 1) != 0;
    }
    break;
  }
  if (allowed.none()) allowed.set(0);
  return allowed;
}

// A list such as 0-3,8,10-11.
std::vector<size_t> parse_list(const std::string& text) {
  std::vector<size_t> numbers;
  std::istringstream ranges(text);
  for (std::string range; std::getline(ranges, range, ',');) {
    size_t first = 0, last = 0;
    char dash = 0;
    std::istringstream ends(range);
    if (!(ends >> first)) continue;
    if (!(ends >> dash >> last)) last = first;
    for (size_t number = first; number <= std::min(last, Cores::most - 1); ++number) numbers.push_back(number);
  }
  return numbers;
}

// A size such as 32768K.
uint64_t parse_size(const std::string& text) {
  uint64_t size = 0;
  char unit = 0;
  std::istringstream(text) >> size >> unit;
  return unit == 'K' ? size << 10 : unit == 'M' ? size << 20 : unit == 'G' ? size << 30 : size;
}

struct Cache {
  uint64_t bytes = 0;
  std::vector<size_t> cores;
};

Cache last_cache_of(size_t core, const path& cores) {
  Cache last;
  int highest = 1;  // the first level has caches of instructions too
  for (int index = 0; index < 8; ++index) {
    const path cache = cores / ("cpu" + std::to_string(core)) / "cache" / ("index" + std::to_string(index));
    const int level = std::atoi(first_line(cache / "level").c_str());
    if (level <= highest) continue;
    highest = level;
    last = {parse_size(first_line(cache / "size")), parse_list(first_line(cache / "shared_cpu_list"))};
  }
  return last;
}

void find_caches(Cores& found, const std::string& root) {
  std::bitset<Cores::most> seen;
  for (size_t core = 0; core < Cores::most; ++core) {
    if (!found.allowed[core] || seen[core]) continue;
    const Cache cache = last_cache_of(core, root + "/sys/devices/system/cpu");
    if (cache.bytes == 0 || cache.cores.empty()) return;  // then the system does not describe the others either
    for (const size_t other : cache.cores) seen[other] = true;
    found.cache_heads[cache.cores.front()] = true;
    found.cache_bytes = found.cache_bytes == 0 ? cache.bytes : std::min(found.cache_bytes, cache.bytes);
  }
}

// ---- Limits of CPU time: of control groups of version 2, or of the controller "cpu" of version 1

bool has_word(const std::string& text, const std::string& word) {
  return ("," + text + ",").find("," + word + ",") != std::string::npos;
}

struct Mount {
  std::string top;  // the control group that is visible there
  path point;
  bool is_second_version;
};

std::vector<Mount> control_group_mounts(const std::string& root) {
  std::vector<Mount> mounts;
  std::ifstream lines(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(lines, line);) {
    std::string skipped, top, point, type, options;
    std::istringstream words(line);
    words >> skipped >> skipped >> skipped >> top >> point;
    while (words >> skipped && skipped != "-") {
    }
    words >> type >> skipped >> options;
    if (type == "cgroup2" || (type == "cgroup" && has_word(options, "cpu"))) {
      mounts.push_back({top, root + point, type == "cgroup2"});
    }
  }
  return mounts;
}

// The path of the process's control group, in the hierarchy of that version.
std::optional<std::string> own_control_group(const std::string& root, bool is_second_version) {
  std::ifstream lines(root + "/proc/self/cgroup");
  for (std::string line; std::getline(lines, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (is_second_version ? controllers.empty() : has_word(controllers, "cpu")) return line.substr(second + 1);
  }
  return std::nullopt;
}

std::optional<double> limit_of(const path& group, bool is_second_version) {
  double quota = 0, period = 0;
  if (is_second_version) {
    std::istringstream(first_line(group / "cpu.max")) >> quota >> period;  // "max 100000" leaves both 0
  } else {
    std::istringstream(first_line(group / "cpu.cfs_quota_us")) >> quota;
    std::istringstream(first_line(group / "cpu.cfs_period_us")) >> period;
  }
  if (quota <= 0 || period <= 0) return std::nullopt;
  return quota / period;
}

uint64_t identity_of(const path& folder) {
  struct stat facts {};
  if (stat(folder.c_str(), &facts) != 0) return 0;
  return (static_cast<uint64_t>(facts.st_dev) << 40) ^ static_cast<uint64_t>(facts.st_ino);
}

// The limits of all parent groups count too.
void find_quota(Cores& found, const std::string& root) {
  for (const Mount& mount : control_group_mounts(root)) {
    std::string own = own_control_group(root, mount.is_second_version).value_or("/");
    if (mount.top != "/") own = own.starts_with(mount.top) ? own.substr(mount.top.size()) : "/";
    if (own.find("..") != std::string::npos) own = "/";
    path group = mount.point / path(own).relative_path();
    for (;; group = group.parent_path()) {
      const auto limit = limit_of(group, mount.is_second_version);
      if (limit && (found.quota_group == 0 || *limit < found.quota)) {
        found.quota = *limit;
        found.quota_group = identity_of(group);
      }
      if (group == mount.point || !group.has_relative_path()) break;
    }
  }
}

// ---- Several processes together

// Finds a core for each of as many processes as possible: augmenting paths.
class Matching {
 public:
  explicit Matching(const std::vector<Cores>& processes) : processes_(processes), owner_(Cores::most, nobody) {}

  int count() {
    int matched = 0;
    for (size_t process = 0; process < processes_.size(); ++process) {
      tried_.reset();
      matched += finds_core(process) ? 1 : 0;
    }
    return matched;
  }

 private:
  static constexpr size_t nobody = SIZE_MAX;

  bool finds_core(size_t process) {
    const auto& allowed = processes_[process].allowed;
    for (const bool free_ones : {true, false}) {
      for (size_t core = 0; core < Cores::most; ++core) {
        if (!allowed[core] || tried_[core] || (owner_[core] == nobody) != free_ones) continue;
        tried_[core] = true;
        if (owner_[core] != nobody && !finds_core(owner_[core])) continue;
        owner_[core] = process;
        return true;
      }
    }
    return false;
  }

  const std::vector<Cores>& processes_;
  std::vector<size_t> owner_;  // by core
  std::bitset<Cores::most> tried_;
};

}  // namespace

Cores find_cores(const std::string& root) {
  Cores found;
  found.allowed = allowed_cores();
  find_caches(found, root);
  find_quota(found, root);
  return found;
}

int count_running(const std::vector<Cores>& processes) {
  std::map<uint64_t, std::pair<int, double>> groups;  // processes and limit, by control group
  for (const Cores& each : processes) {
    const double limit = each.quota_group == 0 ? static_cast<double>(processes.size()) : each.quota;
    auto& [count, least] = groups.try_emplace(each.quota_group, 0, limit).first->second;
    ++count;
    least = std::min(least, limit);
  }
  int within_limits = 0;
  for (const auto& [group, members] : groups) {
    within_limits += std::min(members.first, std::max(1, static_cast<int>(std::floor(members.second))));
  }
  return std::min(within_limits, Matching(processes).count());
}

int turns_on_a_core(const std::vector<Cores>& processes) {
  const int count = static_cast<int>(processes.size()), running = std::max(count_running(processes), 1);
  return std::max((count + running - 1) / running, 1);
}

size_t cache_share(const std::vector<Cores>& processes) {
  std::bitset<Cores::most> heads;
  uint64_t least = UINT64_MAX;
  for (const Cores& each : processes) {
    heads |= each.cache_heads;
    least = std::min(least, each.cache_bytes);
  }
  if (least == 0 || processes.empty()) return usual_cache_bytes / std::max<size_t>(processes.size(), 1);
  return least * heads.count() / processes.size();
}

Patience patience_for(const std::vector<Cores>& processes, bool is_background) {
  if (turns_on_a_core(processes) > 1) return {.spins = 20, .yields = 200};
  if (is_background) return {.spins = 100, .yields = 5};
  return {.spins = 2000, .yields = 50};
}

}  // namespace shoal
