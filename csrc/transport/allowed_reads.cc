#include "transport/allowed_reads.h"

#include <sys/prctl.h>

#include <fstream>
#include <utility>

#include "transport/process.h"

namespace shoal {

namespace {

bool only_ancestors_may_read() {
  std::ifstream file("/proc/sys/kernel/yama/ptrace_scope");
  int scope = 0;
  return file >> scope && scope == 1;
}

}  // namespace

Readers& Readers::of_this_process() {
  static auto* readers = new Readers([](pid_t reader) {  // never destroyed, as groups may be at the very end
    prctl(PR_SET_PTRACER, static_cast<unsigned long>(reader), 0, 0, 0);
  });
  return *readers;
}

Readers::Readers(std::function<void(pid_t reader)> name_reader)
    : name_reader_(std::move(name_reader)), born_in_(generation()) {}

Readers::Group Readers::add(std::vector<pid_t> peers) {
  std::lock_guard lock(mutex_);
  if (std::exchange(born_in_, generation()) != generation()) {
    groups_.clear();
    named_ = 0;
  }
  const auto group = groups_.insert(groups_.end(), std::move(peers));
  const pid_t reader = reader_of_all();
  if (reader != 0) {
    update(reader);
  } else {
    group->clear();
  }
  return group;
}

void Readers::remove(Group group) {
  std::lock_guard lock(mutex_);
  groups_.erase(group);
  bool is_needed = false;
  for (const auto& peers : groups_) is_needed |= !peers.empty();
  const pid_t reader = reader_of_all();
  // Peers whose launcher has ended have no common ancestor any more: then the named process stays the same.
  if (reader != 0 || !is_needed) update(reader);
}

pid_t Readers::reader_of_all() const {
  std::vector<pid_t> all;
  for (const auto& peers : groups_) all.insert(all.end(), peers.begin(), peers.end());
  return nearest_ancestor(all);
}

void Readers::update(pid_t reader) {
  if (reader != named_) name_reader_(reader);
  named_ = reader;
}

AllowedReads::AllowedReads(std::vector<pid_t> peers) {
  if (only_ancestors_may_read()) group_ = Readers::of_this_process().add(std::move(peers));
}

AllowedReads::~AllowedReads() {
  if (group_) Readers::of_this_process().remove(*group_);
}

}  // namespace shoal
