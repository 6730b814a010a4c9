// The boards of ranks that left their groups before all peers had mapped them.
//
// A rank may form a group, and leave it, while a peer that was told of its board has not opened it yet. The board then
// stays until the peer has, or has ended.
#pragma once

#include <sys/types.h>

#include <list>
#include <mutex>
#include <vector>

#include "transport/segment.h"

namespace shoal {

class AwaitedBoards {
 public:
  // The boards of this process. This object is never destroyed.
  static AwaitedBoards& instance();

  // Keeps a board that begins with a Front. `peers`: the processes of the others.
  void keep(Segment board, std::vector<pid_t> peers);

  // Gives back the boards for which nobody waits any more.
  void give_back();

 private:
  // A peer whose group did not form never comes: the oldest board then goes for a newer one.
  static constexpr size_t most = 64;

  struct Awaited {
    Segment board;
    std::vector<pid_t> peers;
  };

  std::mutex mutex_;
  std::list<Awaited> boards_;
};

}  // namespace shoal
