// Hides a descriptor from forked processes.
//
// A connection ends when the last process that has it does. A worker of a data loader, forked from a rank, would keep
// the rank's connections open after the rank was killed, and no peer would notice. (O_CLOEXEC works only for executed
// programs.) In the child the descriptor leads to /dev/null instead, and its number stays in use.
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
