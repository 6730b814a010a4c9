// Streams of bytes between the ranks of a host, through shared memory: small pieces through rings, large ones out of
// the sender's own memory.
#pragma once

#include <sys/types.h>

#include <memory>
#include <vector>

#include "transport/board.h"
#include "transport/link.h"

namespace shoal {

class RingLink final : public Link {
 public:
  // `may_show`: whether the ranks of the host can read each other's memory.
  RingLink(Board& board, int channel, int peer, bool may_show)
      : outward_(board.ring(channel, board.index(), peer)),
        inward_(board.ring(channel, peer, board.index())),
        doorbell_(board.front(peer).doorbell),
        pid_(board.pid_of(peer)),
        rank_(board.rank_of(peer)),
        may_show_(may_show) {}

  // Large data is shown to the peer, and counts as sent when the peer has it: until then the caller passes the same
  // bytes again.
  size_t send(const void* data, size_t size) override;
  size_t receive(void* data, size_t size) override;
  bool append_poll(std::vector<pollfd>&, bool, bool) override { return false; }
  bool is_drained() const override {
    return outward_.read.load(std::memory_order_acquire) == outward_.written.load(std::memory_order_relaxed);
  }

 private:
  size_t write(const void* data, size_t size);
  size_t read(void* data, size_t size);
  size_t take(void* data, size_t size, uint64_t shown);
  void ring_doorbell();

  Ring& outward_;
  Ring& inward_;
  Flag& doorbell_;
  const pid_t pid_;
  const int rank_;
  const bool may_show_;
  uint64_t counted_ = 0;  // shown bytes that `send` has returned
};

// The links to the ranks of the host, by local index.
class RingLinks {
 public:
  RingLinks(Board& board, int channel, bool may_show) {
    for (int peer = 0; peer < board.size(); ++peer) links_.emplace_back(board, channel, peer, may_show);
  }
  RingLink& to(int index) { return links_[static_cast<size_t>(index)]; }

 private:
  std::vector<RingLink> links_;
};

}  // namespace shoal
