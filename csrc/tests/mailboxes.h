// Mailboxes of ranks that are threads: through rings, with and without reading each other's memory, and through queues
// that stand for the network.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "algorithms/mailbox.h"
#include "tests/host_ranks.h"
#include "tests/memory_links.h"
#include "transport/ring_link.h"

namespace shoal::testing {

using Bytes = std::vector<uint8_t>;

enum class Way { read, ring, network };

inline constexpr Patience patience{.spins = 20, .yields = 20};

// The bytes of the message that `from` sends to `to` as its number `number`.
inline Bytes content(int from, int to, int number, size_t bytes) {
  std::mt19937 random(static_cast<unsigned>((from * 64 + to) * 100'003 + number));
  Bytes data(bytes);
  for (uint8_t& byte : data) byte = static_cast<uint8_t>(random());
  return data;
}

// A rank's links through the rings of its host.
class HostLinks final : public Links {
 public:
  explicit HostLinks(Board& board) : board_(board), rings_(board, 1, false) {}
  Link& to(int peer, Deadline) override { return rings_.to(peer); }
  Link* find(int peer) override { return peer == board_.index() ? nullptr : &rings_.to(peer); }

 private:
  Board& board_;
  RingLinks rings_;
};

// A mailbox for every rank.
class Mailboxes {
 public:
  Mailboxes(int size, Way way)
      : host_(size),
        network_(size, 200'000),
        has_left_(static_cast<size_t>(size)) {
    for (int pair = 0; pair < size * size; ++pair) buffers_.emplace_back(host_.shared_buffers());
    for (int rank = 0; rank < size; ++rank) {
      links_.push_back(std::make_unique<HostLinks>(host_[rank].board));
      Mailbox::Peers peers{
          .size = size,
          .links = way == Way::network ? static_cast<Links&>(network_.of(rank)) : *links_.back(),
          .doorbell = way == Way::network ? nullptr : &host_[rank].board.front(rank).doorbell,
          .shared_buffers = host_.shared_buffers(),
          .can_read_peers = way == Way::read,
          .is_here = [way](int) { return way != Way::network; },
          .is_open = [this](int peer) { return !has_left_[static_cast<size_t>(peer)].load(); },
          .read =
              [this, rank, size](int peer, const Notice& offered, size_t offset, size_t bytes, void* out) {
                if (const auto work = std::exchange(before_reading_, nullptr)) work();
                PeerBuffers& buffers = buffers_[static_cast<size_t>(rank * size + peer)];
                PeerMemory(host_[rank].board, buffers, peer, offered.input).copy(offset, bytes, out);
              },
          .note = [](const void*, size_t) {},
      };
      mailboxes_.push_back(std::make_unique<Mailbox>(std::move(peers), host_[rank].alarm));
    }
  }

  SharedBuffers& shared_buffers() { return host_.shared_buffers(); }

  Mailbox& operator[](int rank) { return *mailboxes_[static_cast<size_t>(rank)]; }

  void raise(int rank, Code code) {
    host_[rank].alarm.raise(code, -1, "a test's alarm");
    (*this)[rank].wake();
  }

  bool end(int rank) {
    has_left_[static_cast<size_t>(rank)] = true;
    return host_[rank].alarm.raise(Code::aborted, rank, "the group was closed");
  }

  // What a group does when it is closed; the peers' Watches tell them so if they are `heard`.
  void leave(int rank, double seconds = 60, bool heard = true) {
    (*this)[rank].close([&] { return end(rank); });
    const auto tell = [&](const auto& what) {
      for (size_t peer = 0; peer < mailboxes_.size(); ++peer) {
        if (heard && mailboxes_[peer] && peer != static_cast<size_t>(rank)) what(*mailboxes_[peer]);
      }
    };
    tell([&](Mailbox& mailbox) { mailbox.note_leaving(rank); });
    (*this)[rank].hand_over(Deadline::after(seconds));
    mailboxes_[static_cast<size_t>(rank)].reset();
    tell([&](Mailbox& mailbox) { mailbox.note_gone(rank); });
  }

  // On the network: a rank notices that its connection with a peer was closed.
  void end_link(int rank, int peer) { network_.of(rank).end(peer); }

  // Calls this in the next read of what a peer offers.
  void before_reading(std::function<void()> work) { before_reading_ = std::move(work); }

 private:
  HostRanks host_;
  MemoryNetwork network_;
  std::vector<std::atomic<bool>> has_left_;
  std::vector<PeerBuffers> buffers_;  // of every rank, for each of its peers
  std::function<void()> before_reading_;
  std::vector<std::unique_ptr<HostLinks>> links_;
  std::vector<std::unique_ptr<Mailbox>> mailboxes_;
};

inline void wait(Mailbox& mailbox, Message& message, double seconds = 60) {
  mailbox.wait(message, patience, Deadline::after(seconds));
}

}  // namespace shoal::testing
