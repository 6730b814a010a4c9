// Ranks of one host: threads of a test, with the memory that processes would have in common.
#pragma once

#include <unistd.h>

#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "algorithms/host.h"
#include "common/alarm.h"
#include "transport/board.h"
#include "transport/peer_memory.h"
#include "transport/shared_buffers.h"

namespace shoal::testing {

struct HostOptions {
  uint32_t first_tick = 0;
  bool reads_peers = true;
  size_t most_block_bytes = 512 * 1024;
  Patience patience = {.spins = 20, .yields = 20};  // there are more ranks than cores
};

// The parts that a group of the rank would have; shared buffers belong to the process.
struct HostRank {
  HostRank(int index, int size, SharedBuffers& shared_buffers, const HostOptions& options)
      : index(index),
        board(size, options.first_tick),
        peer_buffers(shared_buffers),
        host{.board = board,
             .peer_buffers = peer_buffers,
             .shared_buffers = shared_buffers,
             .huge_pages = huge_pages,
             .alarm = alarm,
             .patience = options.patience,
             .can_read_peers = options.reads_peers,
             .most_block_bytes = options.most_block_bytes} {}

  const int index;
  Board board;
  PeerBuffers peer_buffers;
  HugePages huge_pages;
  Alarm alarm;
  Host host;
};

class HostRanks {
 public:
  explicit HostRanks(int size, const HostOptions& options = {}) {
    std::vector<Introduction> introductions;
    std::vector<int> numbers;
    for (int index = 0; index < size; ++index) {
      ranks_.push_back(std::make_unique<HostRank>(index, size, shared_buffers_, options));
      introductions.push_back(ranks_.back()->board.introduce());
      numbers.push_back(number_of(index));
    }
    for (auto& rank : ranks_) rank->board.attach(rank->index, introductions, numbers);
  }

  // The rank in the group of the host's rank `index`: another number, to tell the two apart in errors.
  static int number_of(int index) { return index + 100; }

  SharedBuffers& shared_buffers() { return shared_buffers_; }

  HostRank& operator[](int index) { return *ranks_[static_cast<size_t>(index)]; }

  // Calls `work(rank)` on a thread per rank.
  template <class Work>
  void run(const Work& work) {
    std::vector<std::thread> threads;
    for (auto& rank : ranks_) threads.emplace_back([&] { work(*rank); });
    for (std::thread& thread : threads) thread.join();
  }

 private:
  SharedBuffers shared_buffers_;
  std::vector<std::unique_ptr<HostRank>> ranks_;
};

}  // namespace shoal::testing
