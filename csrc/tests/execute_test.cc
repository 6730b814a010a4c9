// The executor over stand-in links, a thread per rank: right results over links of any size and kind, and an end when a
// rank does not take part.

#include "algorithms/execute.h"

#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <set>
#include <thread>

#include "tests/check.h"
#include "tests/collectives.h"
#include "tests/memory_links.h"

using namespace shoal;
using namespace shoal::testing;

namespace {

void execute_on(Buffers& buffers, const Schedule& schedule, Links& links, const Alarm& alarm,
                Deadline deadline) {
  std::vector<std::byte> scratch(schedule.scratch_bytes);
  execute(schedule, Dtype::int32, Reduction::sum, buffers.input.data(), buffers.output.data(), scratch.data(),
          links, alarm, deadline);
}

// Runs one problem after another, as a program would, over the links of this rank.
void run_problems(int rank, const std::vector<Problem>& problems, Links& links) {
  const Alarm alarm;
  for (const Problem& problem : problems) {
    for (const Algorithm& algorithm : algorithms()) {
      Buffers buffers = make_buffers(algorithm.kind, static_cast<size_t>(rank), problem);
      const auto input = buffers.input;
      std::string found;
      try {
        execute_on(buffers, algorithm.make(rank, problem), links, alarm, Deadline::after(60));
      } catch (const Failure& failure) {
        found = algorithm.name + ": " + failure.what();
      }
      CHECK_EQUAL(found, "");
      CHECK(buffers.input == input);
      CHECK(buffers.output == expected_output(algorithm.kind, static_cast<size_t>(rank), problem));
    }
  }
}

void results_are_right_however_little_a_link_holds() {
  struct Case {
    int size;
    size_t capacity;
  };
  for (const auto& [size, capacity] :
       {Case{1, 7}, Case{2, 1}, Case{2, 7}, Case{3, 7}, Case{4, 1000}, Case{5, 7}, Case{6, 100},
        Case{7, 1 << 20}, Case{8, 64}, Case{9, 300}, Case{16, 1 << 20}}) {
    MemoryNetwork network(size, capacity);
    std::vector<Problem> problems;
    for (const size_t count : {0, 1, 90}) problems.push_back({size, size - 1, count, 64});
    run_ranks(size, [&, &problems = problems](int rank) { run_problems(rank, problems, network.of(rank)); });
    CHECK(network.is_empty());
  }
}

void large_buffers_go_through_in_many_pieces() {
  constexpr int size = 3;
  MemoryNetwork network(size, 100000);
  const std::vector<Problem> problems{{size, 1, 100003, 1 << 20}, {size, 1, 100003, 10000}};
  run_ranks(size, [&](int rank) { run_problems(rank, problems, network.of(rank)); });
  CHECK(network.is_empty());
}

// Elements arrive a byte at a time, the widest and the narrowest.
void an_element_may_arrive_in_parts() {
  MemoryNetwork network(2, 1);
  run_ranks(2, [&](int rank) {
    std::array<double, 9> wide;
    std::array<uint8_t, 9> narrow;
    for (size_t index = 0; index < wide.size(); ++index) {
      wide[index] = static_cast<double>(index) + 0.125 * rank;
      narrow[index] = static_cast<uint8_t>(100 * static_cast<size_t>(rank) + index);
    }
    const Schedule of_wide = ring_all_reduce(rank, 2, sizeof(wide), sizeof(double), 1 << 20);
    const Schedule of_narrow = ring_all_reduce(rank, 2, sizeof(narrow), 1, 1 << 20);
    const Alarm alarm;
    execute(of_wide, Dtype::float64, Reduction::sum, nullptr, wide.data(), nullptr, network.of(rank), alarm,
            Deadline::after(60));
    execute(of_narrow, Dtype::uint8, Reduction::maximum, nullptr, narrow.data(), nullptr, network.of(rank),
            alarm, Deadline::after(60));
    for (size_t index = 0; index < wide.size(); ++index) {
      CHECK_EQUAL(wide[index], 2 * static_cast<double>(index) + 0.125);
      CHECK_EQUAL(narrow[index], 100 + index);
    }
  });
}

void an_average_is_left_to_be_divided() {
  MemoryNetwork network(2, 64);
  run_ranks(2, [&](int rank) {
    float value = 3 + static_cast<float>(rank);
    execute(ring_all_reduce(rank, 2, sizeof(value), sizeof(value), 64), Dtype::float32, Reduction::average,
            nullptr, &value, nullptr, network.of(rank), Alarm(), Deadline::after(60));
    CHECK_EQUAL(value, 7.0f);
  });
}

void an_alarm_in_the_middle_frees_every_rank() {
  constexpr int size = 4;
  const Problem problem{size, 0, 50000, 1000};
  for (const Algorithm& algorithm : algorithms()) {
    MemoryNetwork network(size, 100);
    Alarm alarm;
    std::atomic<int> waiting = size - 1;
    run_ranks(size, [&](int rank) {
      if (rank == problem.root) {  // a rank without which no collective can end
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        alarm.raise(Code::peer_lost, rank, "rank 0 ended");
        return;
      }
      Buffers buffers = make_buffers(algorithm.kind, static_cast<size_t>(rank), problem);
      CHECK_THROWS(
          execute_on(buffers, algorithm.make(rank, problem), network.of(rank), alarm, Deadline::after(60)),
          Code::peer_lost);
      --waiting;
    });
    CHECK_EQUAL(waiting.load(), 0);
  }
}

void a_timeout_names_the_rank_that_is_waited_for() {
  constexpr int size = 3, absent = 1;
  const Problem problem{size, absent, 5000, 1000};
  for (const char* name : {"two-shot all-reduce", "direct all-gather", "chain broadcast", "direct gather"}) {
    MemoryNetwork network(size, 10000);
    run_ranks(size, [&](int rank) {
      if (rank == absent) return;
      const Algorithm& tested = algorithm(name);
      Buffers buffers = make_buffers(tested.kind, static_cast<size_t>(rank), problem);
      const Alarm alarm;
      const auto begin = std::chrono::steady_clock::now();
      try {
        execute_on(buffers, tested.make(rank, problem), network.of(rank), alarm, Deadline::after(0.03));
        CHECK(false);
      } catch (const Failure& failure) {
        CHECK_EQUAL(failure.code, Code::timeout);
        const bool waits_for_the_other = name == std::string("chain broadcast") && rank == 0;
        CHECK_EQUAL(failure.rank, waits_for_the_other ? 2 : absent);
      }
      CHECK(std::chrono::steady_clock::now() - begin >= std::chrono::milliseconds(30));
    });
  }
}

// A link through a pair of sockets: one that can be polled.
class SocketLink final : public Link {
 public:
  explicit SocketLink(int socket) : socket_(socket) {}
  SocketLink(const SocketLink&) = delete;
  ~SocketLink() override { close(socket_); }

  size_t send(const void* data, size_t size) override {
    return moved(::send(socket_, data, size, MSG_DONTWAIT | MSG_NOSIGNAL));
  }
  size_t receive(void* data, size_t size) override { return moved(recv(socket_, data, size, MSG_DONTWAIT)); }
  bool append_poll(std::vector<pollfd>& fds, bool sending, bool receiving) override {
    const int events = (sending ? POLLOUT : 0) | (receiving ? POLLIN : 0);
    fds.push_back({socket_, static_cast<short>(events), 0});
    ++polls;
    return true;
  }

  int polls = 0;

 private:
  static size_t moved(ssize_t result) {
    if (result >= 0) return static_cast<size_t>(result);
    if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
    throw system_failure("socket", errno);
  }

  const int socket_;
};

// Links between two ranks.
struct SocketLinks final : Links {
  explicit SocketLinks(int socket) : link(socket) {}

  Link& to(int, Deadline) override { return link; }
  Link* find(int) override { return &link; }

  SocketLink link;
};

std::array<std::unique_ptr<SocketLinks>, 2> connected_pair() {
  int sockets[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) != 0) throw system_failure("socketpair", errno);
  return {std::make_unique<SocketLinks>(sockets[0]), std::make_unique<SocketLinks>(sockets[1])};
}

void a_rank_sleeps_on_links_that_can_be_polled_and_wakes() {
  const auto pair = connected_pair();
  run_ranks(2, [&](int rank) {
    Links& links = *pair[static_cast<size_t>(rank)];
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(30));
    run_problems(rank, {{2, 0, 10, 64}, {2, 1, 100000, 1 << 16}}, links);
  });
  CHECK(pair[0]->link.polls > 0);
}

void a_lost_connection_is_the_links_failure() {
  auto pair = connected_pair();
  pair[1].reset();
  Buffers buffers = make_buffers(Kind::all_reduce, 0, {2, 0, 1000, 1 << 16});
  const Schedule schedule = ring_all_reduce(0, 2, 4000, 4, 1 << 16);
  CHECK_THROWS(execute_on(buffers, schedule, *pair[0], Alarm(), Deadline::after(60)), Code::system);
}

// Links that are made only when both ends ask for them, as a connection may be.
class Rendezvous {
 public:
  void meet(int rank, int peer) {
    std::unique_lock lock(mutex_);
    asked_.insert({rank, peer});
    changed_.notify_all();
    changed_.wait(lock, [&] { return asked_.contains({peer, rank}); });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<std::pair<int, int>> asked_;
};

struct MeetingLinks final : Links {
  MeetingLinks(Rendezvous& r, int own, Links& under) : rendezvous(r), rank(own), links(under) {}

  Link& to(int peer, Deadline deadline) override {
    rendezvous.meet(rank, peer);
    return links.to(peer, deadline);
  }
  Link* find(int peer) override { return links.find(peer); }

  Rendezvous& rendezvous;
  const int rank;
  Links& links;
};

void links_may_wait_for_their_other_end_to_be_asked_for() {
  constexpr int size = 6;
  const Problem problem{size, 2, 90, 64};
  for (const Algorithm& algorithm : algorithms()) {
    MemoryNetwork network(size, 1000);
    Rendezvous rendezvous;
    run_ranks(size, [&](int rank) {
      MeetingLinks links(rendezvous, rank, network.of(rank));
      Buffers buffers = make_buffers(algorithm.kind, static_cast<size_t>(rank), problem);
      execute_on(buffers, algorithm.make(rank, problem), links, Alarm(), Deadline::after(60));
      CHECK(buffers.output == expected_output(algorithm.kind, static_cast<size_t>(rank), problem));
    });
  }
}

}  // namespace

int main() {
  results_are_right_however_little_a_link_holds();
  large_buffers_go_through_in_many_pieces();
  an_element_may_arrive_in_parts();
  an_average_is_left_to_be_divided();
  an_alarm_in_the_middle_frees_every_rank();
  a_timeout_names_the_rank_that_is_waited_for();
  a_rank_sleeps_on_links_that_can_be_polled_and_wakes();
  a_lost_connection_is_the_links_failure();
  links_may_wait_for_their_other_end_to_be_asked_for();
  return report();
}
