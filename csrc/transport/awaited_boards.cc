#include "transport/awaited_boards.h"

#include <algorithm>
#include <utility>

#include "transport/board.h"
#include "transport/process.h"

namespace shoal {

AwaitedBoards& AwaitedBoards::instance() {
  static auto* boards = new AwaitedBoards;
  return *boards;
}

void AwaitedBoards::keep(Segment board, std::vector<pid_t> peers) {
  std::lock_guard lock(mutex_);
  boards_.push_back({std::move(board), std::move(peers)});
  if (boards_.size() > most) boards_.pop_front();
}

void AwaitedBoards::give_back() {
  std::lock_guard lock(mutex_);
  std::erase_if(boards_, [](const Awaited& each) {
    const auto& front = *reinterpret_cast<const Front*>(each.board.data());
    return front.attached.load(std::memory_order_acquire) == static_cast<int>(each.peers.size()) ||
           std::all_of(each.peers.begin(), each.peers.end(), has_ended);
  });
}

}  // namespace shoal
