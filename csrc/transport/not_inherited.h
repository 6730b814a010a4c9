// Keeps a descriptor from the processes that this one forks off.
//
// A connection ends when the last process that has it does. A worker of a data loader, forked off a rank,
// would keep the rank's connections open after the rank was killed, and no peer would notice. (O_CLOEXEC is
// of use to programs that are executed only.) In the child the descriptor leads to /dev/null instead, and
// stays taken.
#pragma once

namespace shoal {

class NotInherited {
 public:
  explicit NotInherited(int descriptor);
  ~NotInherited();  // before the descriptor is closed
  NotInherited(const NotInherited&) = delete;
  NotInherited& operator=(const NotInherited&) = delete;

 private:
  const int descriptor_;
};

}  // namespace shoal
