// Streams of bytes between the ranks of a host, through rings in shared memory.
#pragma once

#include <memory>
#include <vector>

#include "transport/board.h"
#include "transport/link.h"

namespace shoal {

class RingLink final : public Link {
 public:
  RingLink(Board& board, int channel, int peer)
      : outward_(board.ring(channel, board.index(), peer)),
        inward_(board.ring(channel, peer, board.index())),
        doorbell_(board.front(peer).doorbell) {}

  size_t send(const void* data, size_t size) override;
  size_t receive(void* data, size_t size) override;
  bool append_poll(std::vector<pollfd>&, bool, bool) override { return false; }

 private:
  void ring_doorbell();

  Ring& outward_;
  Ring& inward_;
  Flag& doorbell_;
};

// The links to the ranks of the host, by local index.
class RingLinks {
 public:
  RingLinks(Board& board, int channel) {
    for (int peer = 0; peer < board.size(); ++peer) links_.emplace_back(board, channel, peer);
  }
  RingLink& to(int index) { return links_[static_cast<size_t>(index)]; }

 private:
  std::vector<RingLink> links_;
};

}  // namespace shoal
