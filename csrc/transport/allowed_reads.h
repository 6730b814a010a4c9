// Who may read this process's memory, where the system asks (process_vm_readv).
//
// Yama's rule (kernel.yama.ptrace_scope is 1, the default of some distributions) is that only a process's ancestors
// may. A process can name one other, which may then read it too, as may all that descend from it (PR_SET_PTRACER). So
// a rank names its peer, if its groups have one peer on this host in all, and otherwise the nearest process that all
// of the peers descend from: their launcher. PID 1, from which all descend, is never named; where there is no nearer
// one nobody is, and the ranks copy instead of reading. Where the rule is another one, nothing is named.
#pragma once

#include <sys/types.h>

#include <functional>
#include <list>
#include <mutex>
#include <optional>
#include <vector>

namespace shoal {

// The peers of all groups, of which one process is named on behalf of all.
class Readers {
 public:
  // `name_reader` names a process; 0: none.
  explicit Readers(std::function<void(pid_t reader)> name_reader);

  // Those of this process.
  static Readers& of_this_process();

  // Peers of a group, and their removal, by what `add` gave. A group for which nobody can be named beside those of the
  // groups before it does not change what these have.
  using Group = std::list<std::vector<pid_t>>::iterator;
  Group add(std::vector<pid_t> peers);
  void remove(Group group);

 private:
  void update(pid_t reader);
  pid_t reader_of_all() const;

  const std::function<void(pid_t)> name_reader_;
  std::mutex mutex_;
  std::list<std::vector<pid_t>> groups_;  // without peers: those for which nobody could be named
  pid_t named_ = 0;
  unsigned born_in_;  // what was named before a fork was named for the parent
};

// Lets the peers of a group read this process for as long as this lives.
class AllowedReads {
 public:
  explicit AllowedReads(std::vector<pid_t> peers);
  ~AllowedReads();
  AllowedReads(const AllowedReads&) = delete;

 private:
  std::optional<Readers::Group> group_;  // none where nobody has to be named
};

}  // namespace shoal
