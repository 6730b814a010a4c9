// The exception of the core; the C interface turns it into a code, a rank and a text.
#pragma once

#include <stdexcept>
#include <string>

namespace shoal {

enum class Code : int {
  ok = 0,
  invalid = 1,       // an argument that cannot be served; nothing was sent
  timeout = 2,       // the timeout of the operation ran out
  peer_lost = 3,     // a process ended, or its connection did
  peer_stopped = 4,  // a process is there but shows no sign of life
  aborted = 5,       // abort() was called here
  mismatch = 6,      // ranks called different operations, sizes or types
  system = 7,        // the operating system refused something
  refused = 8,       // a connection without the group's secret
  interrupted = 9,   // a signal handler raised while the thread waited; the operation may go on
  unfinished = 10,   // the time given to a wait ran out; the operation goes on
  denied = 11,       // the system's rules keep this process from a peer's memory; the peer is well
};

// `rank` is the rank (within the group) that the failure is about, or -1; `error` is the errno that caused it, or 0.
class Failure : public std::runtime_error {
 public:
  Failure(Code code, int rank, const std::string& text, int error = 0)
      : std::runtime_error(text), code(code), rank(rank), error(error) {}

  const Code code;
  const int rank;
  const int error;
};

// A Failure(Code::system) whose text is `what` followed by the text of `error` (an errno), and, if a limit was reached,
// by the change to make.
Failure system_failure(const std::string& what, int error, int rank = -1);

// Whether an errno says that there are no more descriptors, or no more memory: giving back kept memory may help.
bool has_run_out(int error);

}  // namespace shoal
