// Links between ranks that are threads of one process: bounded queues of bytes. The stand-in for every
// transport.
#pragma once

#include <algorithm>
#include <atomic>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "common/error.h"
#include "transport/link.h"

namespace shoal::testing {

// One direction of one link.
class MemoryStream {
 public:
  explicit MemoryStream(size_t capacity) : capacity_(capacity) {}

  size_t write(const void* data, size_t size) {
    std::lock_guard lock(mutex_);
    const size_t taken = std::min(size, capacity_ - bytes_.size());
    const auto* const begin = static_cast<const std::byte*>(data);
    bytes_.insert(bytes_.end(), begin, begin + taken);
    return taken;
  }

  size_t read(void* data, size_t size) {
    std::lock_guard lock(mutex_);
    const auto given = static_cast<std::ptrdiff_t>(std::min(size, bytes_.size()));
    std::copy(bytes_.begin(), bytes_.begin() + given, static_cast<std::byte*>(data));
    bytes_.erase(bytes_.begin(), bytes_.begin() + given);
    return static_cast<size_t>(given);
  }

  bool is_empty() {
    std::lock_guard lock(mutex_);
    return bytes_.empty();
  }

 private:
  const size_t capacity_;
  std::mutex mutex_;
  std::deque<std::byte> bytes_;
};

class MemoryLink final : public Link {
 public:
  MemoryLink(MemoryStream& outward, MemoryStream& inward) : outward_(outward), inward_(inward) {}

  size_t send(const void* data, size_t size) override { return check(), outward_.write(data, size); }
  size_t receive(void* data, size_t size) override { return check(), inward_.read(data, size); }
  bool append_poll(std::vector<pollfd>&, bool, bool) override { return false; }

  // As a connection that its other end has closed.
  void end() { is_ended_ = true; }

 private:
  void check() const {
    if (is_ended_) throw Failure(Code::peer_lost, -1, "the link has ended");
  }

  std::atomic<bool> is_ended_{false};
  MemoryStream& outward_;
  MemoryStream& inward_;
};

class MemoryLinks final : public Links {
 public:
  void add(MemoryStream& outward, MemoryStream& inward) { links_.emplace_back(outward, inward); }

  Link& to(int peer, Deadline) override { return links_[static_cast<size_t>(peer)]; }
  Link* find(int peer) override { return &links_[static_cast<size_t>(peer)]; }
  void end(int peer) { links_[static_cast<size_t>(peer)].end(); }

 private:
  std::deque<MemoryLink> links_;
};

// Links between all ranks, each of which holds `capacity` bytes on their way.
class MemoryNetwork {
 public:
  MemoryNetwork(int size, size_t capacity) : links_(static_cast<size_t>(size)) {
    const auto ranks = static_cast<size_t>(size);
    for (size_t stream = 0; stream < ranks * ranks; ++stream) streams_.emplace_back(capacity);
    for (size_t rank = 0; rank < ranks; ++rank) {
      for (size_t peer = 0; peer < ranks; ++peer) {
        links_[rank].add(streams_[rank * ranks + peer], streams_[peer * ranks + rank]);
      }
    }
  }

  MemoryLinks& of(int rank) { return links_[static_cast<size_t>(rank)]; }

  bool is_empty() {
    return std::all_of(streams_.begin(), streams_.end(),
                       [](MemoryStream& stream) { return stream.is_empty(); });
  }

 private:
  std::deque<MemoryStream> streams_;
  std::vector<MemoryLinks> links_;
};

// Calls `body(rank)` on a thread per rank.
inline void run_ranks(int size, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back(body, rank);
  for (auto& thread : threads) thread.join();
}

}  // namespace shoal::testing
