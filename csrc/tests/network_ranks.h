// Ranks of a group that seem to be on different hosts: threads of a test, or processes.
#pragma once

#include <dirent.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/alarm.h"
#include "common/deadline.h"
#include "transport/process.h"
#include "transport/tcp_network.h"
#include "transport/watch.h"

namespace shoal::testing {

inline Secret secret_of(uint8_t value) {
  Secret secret;
  secret.fill(value);
  return secret;
}

// The part of a rank's memory that the other ranks of its host map.
struct Shown {
  std::atomic<uint64_t> heartbeat{0};
  std::atomic<uint32_t> state{0};
  Presence presence;
  Reason reason{};

  LocalPeer as(int rank, pid_t pid = getpid()) {
    return {rank, pid, start_time_of(pid), &heartbeat, &state, &presence, &reason};
  }
};

struct RankOptions {
  int streams = 1;
  std::string address = "127.0.0.1";
  Watch::Limits limits{};
  double handshake_limit = 5;
};

// One rank, with all that a group would have around its network.
struct NetworkRank {
  NetworkRank(int rank, int size, const RankOptions& options)
      : NetworkRank(rank, size, options, std::make_shared<Hub>(options.handshake_limit)) {}

  // A rank of a process that has other groups too.
  NetworkRank(int rank, int size, const RankOptions& options, std::shared_ptr<Hub> process)
      : rank(rank),
        shared_hub(std::move(process)),
        hub(*shared_hub),
        watch(shown.as(rank), waiting, options.limits, alarm, hub, [this] { network.interrupt(); }),
        network(rank, size, options.address, options.streams, alarm, watch, hub) {}

  ~NetworkRank() { watch.leave(); }

  void start(const std::vector<Endpoint>& endpoints, const Secret& secret, double seconds = 20) {
    std::vector<int> others;
    for (int other = 0; other < static_cast<int>(endpoints.size()); ++other) {
      if (other != rank) others.push_back(other);
    }
    network.start(endpoints, others, secret, Deadline::after(seconds));
  }

  const int rank;
  Shown shown;
  std::atomic<int> waiting{0};
  Alarm alarm;
  const std::shared_ptr<Hub> shared_hub;
  Hub& hub;
  Watch watch;
  TcpNetwork network;
};

using Ranks = std::vector<std::unique_ptr<NetworkRank>>;

// Runs `work` for every rank, each in a thread of its own.
template <class Work>
void on_every_rank(Ranks& ranks, const Work& work) {
  std::vector<std::thread> threads;
  for (auto& rank : ranks) threads.emplace_back([&] { work(*rank); });
  for (std::thread& thread : threads) thread.join();
}

inline Ranks make_ranks(int size, const RankOptions& options = {}) {
  Ranks ranks;
  for (int rank = 0; rank < size; ++rank) ranks.push_back(std::make_unique<NetworkRank>(rank, size, options));
  return ranks;
}

// Ranks of the processes that have these Hubs.
using Hubs = std::vector<std::shared_ptr<Hub>>;

inline Hubs make_hubs(int size) {
  Hubs hubs;
  for (int index = 0; index < size; ++index) hubs.push_back(std::make_shared<Hub>());
  return hubs;
}

inline Ranks make_ranks_of(const Hubs& hubs, const RankOptions& options = {}) {
  Ranks ranks;
  const int size = static_cast<int>(hubs.size());
  for (int rank = 0; rank < size; ++rank) {
    ranks.push_back(std::make_unique<NetworkRank>(rank, size, options, hubs[static_cast<size_t>(rank)]));
  }
  return ranks;
}

inline std::vector<Endpoint> endpoints_of(const Ranks& ranks) {
  std::vector<Endpoint> endpoints;
  for (const auto& rank : ranks) endpoints.push_back(rank->network.endpoint());
  return endpoints;
}

// A group of `size` ranks that are connected.
inline Ranks form(int size, const RankOptions& options = {}) {
  Ranks ranks = make_ranks(size, options);
  const std::vector<Endpoint> endpoints = endpoints_of(ranks);
  on_every_rank(ranks, [&](NetworkRank& rank) { rank.start(endpoints, secret_of(7)); });
  return ranks;
}

// Memory that is shared with the children of this process.
template <class T>
class SharedWithChildren {
 public:
  SharedWithChildren() {
    void* memory = mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw system_failure("mmap", errno);
    value_ = new (memory) T;
  }
  ~SharedWithChildren() { munmap(value_, sizeof(T)); }
  SharedWithChildren(const SharedWithChildren&) = delete;
  T* operator->() { return value_; }

 private:
  T* value_;
};

// A process that runs `work` and exits; killed with its owner, if it is still there. Make it while this process has one
// thread: the thread sanitizer requires it.
class Child {
 public:
  explicit Child(const std::function<void()>& work) : pid_((std::fflush(nullptr), fork())) {
    if (pid_ != 0) return;
    try {
      work();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "in a child: %s\n", error.what());
      _exit(1);
    }
    _exit(0);
  }
  ~Child() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  Child(const Child&) = delete;

  pid_t pid() const { return pid_; }
  void signal(int number) const { kill(pid_, number); }

 private:
  const pid_t pid_;
};

// Whether `condition` comes to hold within `seconds`.
template <class Condition>
bool comes_true(const Condition& condition, double seconds = 10) {
  const Deadline deadline = Deadline::after(seconds);
  while (!condition()) {
    if (deadline.has_passed()) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return true;
}

inline void sleep_for(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

// What the alarm holds, or Code::ok.
inline Failure raised(const Alarm& alarm) {
  try {
    alarm.check();
  } catch (const Failure& failure) {
    return failure;
  }
  return Failure(Code::ok, -1, "");
}

inline int open_descriptors() {
  int count = 0;
  DIR* directory = opendir("/proc/self/fd");
  while (readdir(directory) != nullptr) ++count;
  closedir(directory);
  return count;
}

// Sends and receives over a link, both at once, waiting as needed. Throws what the link or the alarm throws.
inline void exchange(Link& link, const std::string& outgoing, std::string& incoming, const Alarm& alarm) {
  size_t sent = 0, received = 0;
  std::vector<pollfd> polled;
  while (sent < outgoing.size() || received < incoming.size()) {
    const size_t out = link.send(outgoing.data() + sent, outgoing.size() - sent);
    const size_t in = link.receive(incoming.data() + received, incoming.size() - received);
    sent += out, received += in;
    if (out + in > 0) continue;
    polled.clear();
    link.append_poll(polled, sent < outgoing.size(), received < incoming.size());
    poll(polled.data(), polled.size(), 5000);
    alarm.check();
  }
}

}  // namespace shoal::testing
