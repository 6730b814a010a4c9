#include "transport/processes.h"

#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "transport/process.h"

namespace shoal {

namespace {

Descriptor open_process(pid_t pid) {
  constexpr long pidfd_open = 434;  // on every architecture; older headers do not name it
  return Descriptor(static_cast<int>(syscall(pidfd_open, pid, 0)));
}

}  // namespace

Processes::~Processes() {
  for (auto& [pid, process] : processes_) loop_.remove(process.descriptor.number());
}

Processes::Sight Processes::watch(pid_t pid, uint64_t started, std::function<void()> on_end, Watcher& watcher) {
  auto found = processes_.find(pid);
  if (found == processes_.end()) {
    Descriptor descriptor = open_process(pid);
    const bool was_missing = !descriptor && errno == ESRCH;
    const uint64_t found_started = start_time_of(pid);
    const bool is_another = found_started != started && found_started != 0 && started != 0;
    if (was_missing || is_another) return Sight::ended;
    if (!descriptor) return Sight::unknown;
    found = processes_.emplace(pid, Process{std::move(descriptor), {}}).first;
    loop_.add(found->second.descriptor.number(), EPOLLIN, [this, pid](uint32_t) { ended(pid); });
  } else if (start_time_of(pid) != started && started != 0) {
    return Sight::ended;  // an entry belongs to a process that has not ended, or whose end will be reported soon
  }
  watcher = ++last_;
  found->second.watchers.emplace(watcher, std::move(on_end));
  return Sight::watched;
}

void Processes::forget(pid_t pid, Watcher watcher) {
  const auto found = processes_.find(pid);
  if (found == processes_.end()) return;
  found->second.watchers.erase(watcher);
  if (!found->second.watchers.empty()) return;
  loop_.remove(found->second.descriptor.number());
  processes_.erase(found);
}

void Processes::ended(pid_t pid) {
  const auto found = processes_.find(pid);
  if (found == processes_.end()) return;
  loop_.remove(found->second.descriptor.number());
  const auto watchers = std::move(found->second.watchers);
  processes_.erase(found);
  for (const auto& [watcher, on_end] : watchers) on_end();
}

}  // namespace shoal
