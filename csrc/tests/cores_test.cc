// How many ranks have a core, and how much cache: from the cores of each rank, and from the files of a system.
#include "common/cores.h"

#include <sched.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>

#include "tests/check.h"

using namespace shoal;

namespace {

namespace fs = std::filesystem;

Cores bound_to(std::initializer_list<size_t> cores) {
  Cores bound;
  for (const size_t core : cores) bound.allowed[core] = true;
  return bound;
}

Cores limited(Cores cores, double quota, uint64_t group) {
  cores.quota = quota;
  cores.quota_group = group;
  return cores;
}

void ranks_that_are_bound_to_a_core_each_spin() {
  const std::vector<Cores> pinned{bound_to({0}), bound_to({1}), bound_to({2}), bound_to({3})};
  CHECK_EQUAL(count_running(pinned), 4);
  CHECK_EQUAL(turns_on_a_core(pinned), 1);
  CHECK_EQUAL(patience_for(pinned, false).spins, 2000);
  CHECK(patience_for(pinned, true).spins < 2000);  // in the background it leaves the core to the application
}

void ranks_that_share_a_core_do_not_spin() {
  CHECK_EQUAL(count_running({bound_to({0, 1}), bound_to({0, 1}), bound_to({0, 1})}), 2);
  // A wide set of another rank does not help ranks that are bound to the same core.
  const std::vector<Cores> crowded{bound_to({0}), bound_to({0}), bound_to({0, 1, 2, 3, 4, 5})};
  CHECK_EQUAL(count_running(crowded), 2);
  CHECK(patience_for(crowded, false).spins < 100);
  CHECK_EQUAL(turns_on_a_core(crowded), 2);
}

void the_first_ranks_leave_cores_to_those_that_can_use_no_others() {
  CHECK_EQUAL(count_running({bound_to({0, 1, 2}), bound_to({0, 1}), bound_to({0})}), 3);
  CHECK_EQUAL(count_running({bound_to({0, 1, 2}), bound_to({0, 1}), bound_to({0}), bound_to({1, 2})}), 3);
}

void limits_of_time_count_once_for_a_control_group() {
  const Cores any = bound_to({0, 1, 2, 3});
  CHECK_EQUAL(count_running({limited(any, 1.5, 7), limited(any, 1.5, 7)}), 1);
  CHECK_EQUAL(count_running({limited(any, 2, 7), limited(any, 2, 7)}), 2);
  CHECK_EQUAL(count_running({limited(any, 1, 7), limited(any, 1, 8)}), 2);
  CHECK_EQUAL(count_running({limited(any, 1, 7), limited(any, 1, 7), any, any}), 3);
  CHECK_EQUAL(count_running({limited(any, 0.1, 7)}), 1);
}

void caches_are_shared_by_all_ranks_that_have_them() {
  Cores one = bound_to({0, 1}), two = bound_to({2, 3});
  one.cache_bytes = two.cache_bytes = 32 << 20;
  one.cache_heads[0] = two.cache_heads[2] = true;
  CHECK_EQUAL(cache_share({one, one}), size_t{16} << 20);
  CHECK_EQUAL(cache_share({one, two}), size_t{32} << 20);
  CHECK(cache_share({bound_to({0}), bound_to({1})}) > 0);  // where the system does not say
}

// A file tree as the system shows it.
class System {
 public:
  System() {
    char name[] = "/tmp/shoal_cores_XXXXXX";
    root_ = mkdtemp(name);
  }
  ~System() { fs::remove_all(root_); }

  void write(const std::string& file, const std::string& text) const {
    const fs::path path = root_ + file;
    fs::create_directories(path.parent_path());
    std::ofstream(path) << text << "\n";
  }

  Cores find() const { return find_cores(root_); }

 private:
  std::string root_;
};

void the_system_says_which_cores_share_a_cache() {
  cpu_set_t before, first;
  sched_getaffinity(0, sizeof before, &before);
  CPU_ZERO(&first);
  for (size_t core = 0; core < CPU_SETSIZE && CPU_COUNT(&first) == 0; ++core) {
    if (CPU_ISSET(core, &before)) CPU_SET(core, &first);
  }
  sched_setaffinity(0, sizeof first, &first);
  size_t own = 0;
  while (!CPU_ISSET(own, &first)) ++own;
  System system;
  const std::string caches = "/sys/devices/system/cpu/cpu" + std::to_string(own) + "/cache/";
  const std::string shared = std::to_string(own) + "-" + std::to_string(own + 7) + "," + std::to_string(own + 16);
  system.write(caches + "index0/level", "1");
  system.write(caches + "index2/level", "2");
  system.write(caches + "index2/size", "1024K");
  system.write(caches + "index2/shared_cpu_list", std::to_string(own));
  system.write(caches + "index3/level", "3");
  system.write(caches + "index3/size", "96M");
  system.write(caches + "index3/shared_cpu_list", shared);
  const Cores found = system.find();
  CHECK_EQUAL(found.allowed.count(), 1);
  CHECK_EQUAL(found.cache_bytes, uint64_t{96} << 20);
  CHECK(found.cache_heads.count() == 1 && found.cache_heads[own]);
  CHECK_EQUAL(found.quota_group, 0);
  sched_setaffinity(0, sizeof before, &before);
}

void the_tightest_limit_of_a_control_group_and_those_above_it_counts() {
  System second;
  second.write("/proc/self/cgroup", "0::/pods/one");
  second.write("/proc/self/mountinfo", "30 20 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw");
  second.write("/sys/fs/cgroup/pods/one/cpu.max", "max 100000");
  CHECK_EQUAL(second.find().quota_group, 0);
  second.write("/sys/fs/cgroup/pods/cpu.max", "150000 100000");
  CHECK(second.find().quota_group != 0);
  CHECK_EQUAL(second.find().quota, 1.5);
  second.write("/sys/fs/cgroup/pods/one/cpu.max", "50000 100000");
  CHECK_EQUAL(second.find().quota, 0.5);

  System container;  // which sees its own control group as the top
  container.write("/proc/self/cgroup", "0::/");
  container.write("/proc/self/mountinfo", "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup rw");
  container.write("/sys/fs/cgroup/cpu.max", "200000 100000");
  CHECK_EQUAL(container.find().quota, 2.0);

  System first;  // of version 1, in a container that sees paths of the host
  first.write("/proc/self/cgroup", "4:memory:/docker/c1\n2:cpu,cpuacct:/docker/c1/step");
  first.write("/proc/self/mountinfo",
              "40 20 0:31 /docker/c1 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
              "41 20 0:32 /docker/c1 /sys/fs/cgroup/cpu,cpuacct ro shared:9 - cgroup cgroup rw,cpu,cpuacct");
  first.write("/sys/fs/cgroup/cpu,cpuacct/step/cpu.cfs_quota_us", "-1");
  first.write("/sys/fs/cgroup/cpu,cpuacct/step/cpu.cfs_period_us", "100000");
  CHECK_EQUAL(first.find().quota_group, 0);
  first.write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "250000");
  first.write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000");
  CHECK_EQUAL(first.find().quota, 2.5);
}

void this_system_can_be_asked() {
  const Cores found = find_cores();
  CHECK(found.allowed.any());
  CHECK_EQUAL(count_running({found}), 1);
}

}  // namespace

int main() {
  ranks_that_are_bound_to_a_core_each_spin();
  ranks_that_share_a_core_do_not_spin();
  the_first_ranks_leave_cores_to_those_that_can_use_no_others();
  limits_of_time_count_once_for_a_control_group();
  caches_are_shared_by_all_ranks_that_have_them();
  the_system_says_which_cores_share_a_cache();
  the_tightest_limit_of_a_control_group_and_those_above_it_counts();
  this_system_can_be_asked();
  return report();
}
