// The processes that may read this process's memory, where the system restricts it (process_vm_readv).
//
// Yama's rule (kernel.yama.ptrace_scope is 1, the default of some distributions) is that only a process's ancestors
// may. A process can name one other process, which may then read it too, with all its descendants (PR_SET_PTRACER). So
// a rank names its peer, if its groups have only one peer on this host, and otherwise the nearest common ancestor of
// all peers: their launcher. PID 1, the ancestor of all, is never named; if there is no nearer ancestor, no process is
// named, and the ranks copy instead of reading. Under other rules no process is named.
#pragma once

#include <sys/types.h>

#include <functional>
#include <list>
#include <mutex>
#include <optional>
#include <vector>

namespace shoal {

// The peers of all groups, and the one process that is named for them.
class Readers {
 public:
  // `name_reader` names a process; 0: none.
  explicit Readers(std::function<void(pid_t reader)> name_reader);

  // The readers of this process.
  static Readers& of_this_process();

  // Adds the peers of a group, and removes them by the result of `add`. If no process can be named for a new group
  // together with the groups before it, the named process stays the same.
  using Group = std::list<std::vector<pid_t>>::iterator;
  Group add(std::vector<pid_t> peers);
  void remove(Group group);

 private:
  void update(pid_t reader);
  pid_t reader_of_all() const;

  const std::function<void(pid_t)> name_reader_;
  std::mutex mutex_;
  std::list<std::vector<pid_t>> groups_;  // without peers: groups for which no process could be named
  pid_t named_ = 0;
  unsigned born_in_;  // a name from before a fork is for the parent
};

// Lets the peers of a group read this process for as long as this lives.
class AllowedReads {
 public:
  explicit AllowedReads(std::vector<pid_t> peers);
  ~AllowedReads();
  AllowedReads(const AllowedReads&) = delete;

 private:
  std::optional<Readers::Group> group_;  // none if no process must be named
};

}  // namespace shoal
