// Groups whose ranks are threads, on one host and on several hosts, which the loopback interface connects.
#include "group.h"

#include <array>
#include <bit>
#include <chrono>
#include <cstring>
#include <optional>
#include <random>

#include "tests/calls.h"
#include "tests/check.h"
#include "tests/network_ranks.h"

using namespace shoal;
using namespace shoal::testing;

namespace {

using Method = shoal::Algorithm;
using Hosts = std::vector<int>;

class Groups {
 public:
  explicit Groups(const Hosts& hosts, bool reads_peers = true) {
    const int size = static_cast<int>(hosts.size());
    std::vector<std::string> introductions;
    for (int rank = 0; rank < size; ++rank) {
      GroupOptions options;
      options.rank = rank;
      options.hosts = hosts;
      options.bind_address = "127.0.0.1";
      hubs_.push_back(std::make_unique<Hub>());  // as if each rank were a process
      groups_.push_back(std::make_unique<Group>(options, shared_buffers_, *hubs_.back()));
      introductions.push_back(groups_.back()->introduce());
    }
    run([&](Group& group) { CHECK(group.join(introductions, secret_of(7), Deadline::after(60)) == Reach::reads); });
    run([&](Group& group) { group.start(reads_peers); });
  }

  Group& operator[](int rank) { return *groups_[static_cast<size_t>(rank)]; }
  SharedBuffers& shared_buffers() { return shared_buffers_; }

  // Calls `work(group)` on a thread per rank.
  template <class Work>
  void run(const Work& work) {
    std::vector<std::thread> threads;
    for (auto& group : groups_) {
      threads.emplace_back([&] {
        try {
          work(*group);
        } catch (const std::exception& error) {
          std::fprintf(stderr, "rank %d: %s\n", group->rank(), error.what());
          CHECK(false);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  void close(int rank) { groups_[static_cast<size_t>(rank)].reset(); }

 private:
  SharedBuffers shared_buffers_;
  std::vector<std::unique_ptr<Hub>> hubs_;
  std::vector<std::unique_ptr<Group>> groups_;
};

const std::vector<Hosts> layouts = {{0}, {0, 0}, {0, 0, 0}, {0, 1}, {0, 0, 1, 1}, {0, 1, 0}, {0, 1, 2}};

void call(Group& group, Operation operation, bool asynchronous = false) {
  if (const auto task = group.call(std::move(operation), asynchronous)) group.wait(*task);
}

Operation all_reduce_of(std::vector<float>& data, double seconds, Method algorithm) {
  Operation operation;
  operation.collective = Collective::all_reduce;
  operation.algorithm = algorithm;
  operation.dtype = Dtype::float32;
  operation.input = operation.output = data.data();
  operation.bytes = data.size() * sizeof(float);
  operation.deadline = Deadline::after(seconds);
  return operation;
}

// The methods for a collective; on one host, one-shot and direct go through its memory.
std::vector<Method> methods_of(Kind kind) {
  switch (kind) {
    case Kind::all_reduce:
      return {Method::one_shot, Method::direct,      Method::ring,
              Method::halving_doubling, Method::double_tree, Method::hierarchical};
    case Kind::all_gather:
    case Kind::reduce_scatter:
      return {Method::direct, Method::ring, Method::halving_doubling};
    case Kind::broadcast:
    case Kind::reduce:
      return {Method::tree, Method::chain};
    case Kind::all_to_all:
      return {Method::pairwise};
    default:
      return {Method::direct};
  }
}

// Operations that a rank began and has not waited for yet.
struct Begun {
  Kind kind;
  Problem problem;
  std::unique_ptr<Elements> input, output;
  std::shared_ptr<Task> task;
};

// The same random program on all ranks; some operations are waited for at once, and some much later.
void programs_give_what_the_reference_gives(const Hosts& hosts, bool reads_peers, unsigned seed) {
  Groups groups(hosts, reads_peers);
  const int size = static_cast<int>(hosts.size());
  groups.run([&](Group& group) {
    std::mt19937 random(seed);
    const auto pick = [&](const auto& options) { return options[random() % std::size(options)]; };
    constexpr size_t counts[] = {0, 1, 15, 17, 1000, 4099, 33'000};
    std::vector<Begun> begun;
    const auto finish_all = [&] {
      for (Begun& each : begun) {
        if (each.task) group.wait(*each.task);
        const auto own = static_cast<size_t>(group.rank());
        CHECK(each.output->values() == expected_output(each.kind, own, each.problem));
      }
      begun.clear();
    };
    for (int turn = 0; turn < 60; ++turn) {
      const Kind kind = pick(kinds);
      const Method method = pick(methods_of(kind));
      const Problem problem{size, static_cast<int>(random() % static_cast<unsigned>(size)), pick(counts), 0};
      const bool in_place = kind == Kind::all_reduce || kind == Kind::broadcast;
      const bool is_shared = random() % 2 == 0, asynchronous = random() % 2 == 0;
      const Buffers buffers = make_buffers(kind, static_cast<size_t>(group.rank()), problem);
      begun.push_back({kind, problem, {}, {}, nullptr});
      Begun& last = begun.back();
      last.input = std::make_unique<Elements>(buffers.input, groups.shared_buffers(), is_shared);
      last.output = std::make_unique<Elements>(buffers.output, groups.shared_buffers(), is_shared);
      const void* input = in_place ? last.output->data() : last.input->data();
      Operation operation = operation_of(kind, problem, group.rank(), input, last.output->data());
      operation.algorithm = method;
      last.task = group.call(std::move(operation), asynchronous);
      if (random() % 4 == 0) finish_all();
    }
    finish_all();
    Operation barrier;
    barrier.algorithm = Method::hierarchical;
    call(group, barrier);
  });
}

void messages_and_collectives_do_not_disturb_each_other(const Hosts& hosts) {
  Groups groups(hosts);
  const int size = static_cast<int>(hosts.size());
  groups.run([&](Group& group) {
    const int next = (group.rank() + 1) % size, previous = (group.rank() + size - 1) % size;
    for (int turn = 0; turn < 20; ++turn) {
      const size_t count = turn % 3 == 0 ? 50'000 : 10;
      const auto sent = elements_of(static_cast<size_t>(group.rank()), count);
      std::vector<uint32_t> received(count);
      std::vector<float> sum(5000, 1);
      const auto send = group.send(next, turn, sent.data(), count * sizeof(uint32_t));
      const int sender = turn % 2 == 0 ? previous : -1;
      const auto receive = group.receive(sender, turn, received.data(), count * sizeof(uint32_t));
      call(group, all_reduce_of(sum, 60, Method::ring), true);
      group.wait(*receive, Deadline::after(60));
      group.wait(*send, Deadline::after(60));
      CHECK_EQUAL(receive->sender, previous);
      CHECK(received == elements_of(static_cast<size_t>(previous), count));
      CHECK(sum == std::vector<float>(5000, static_cast<float>(size)));
    }
  });
}

// Rank 0 leaves when its sends are complete, and uses its memory for other things. The others receive much later.
void messages_of_a_rank_that_left_are_received(const Hosts& hosts) {
  Groups groups(hosts);
  constexpr size_t counts[] = {10, 15'000, 30'000, 200'000};
  groups.run([&](Group& group) {
    if (group.rank() == 0) {
      for (int peer = 1; peer < group.size(); ++peer) {
        for (int tag = 0; tag < 4; ++tag) {
          auto data = elements_of(static_cast<size_t>(peer), counts[tag]);
          group.wait(*group.send(peer, tag, data.data(), data.size() * sizeof(uint32_t)), Deadline::after(60));
        }
      }
      groups.close(0);
      for (const size_t count : counts) {
        void* other = groups.shared_buffers().allocate(std::bit_ceil(count * sizeof(uint32_t)));
        std::memset(other, 7, count * sizeof(uint32_t));
      }
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    for (const int tag : {3, 0, 2, 1}) {
      std::vector<uint32_t> received(counts[tag]);
      const auto message = group.receive(0, tag, received.data(), received.size() * sizeof(uint32_t));
      group.wait(*message, Deadline::after(60));
      CHECK(received == elements_of(static_cast<size_t>(group.rank()), counts[tag]));
    }
    if (hosts != Hosts{0, 0}) return;  // there the end is noticed much sooner than between hosts
    uint32_t none = 0;
    const auto missing = group.receive(0, 9, &none, sizeof none);
    CHECK_THROWS(group.wait(*missing, Deadline::after(60)), Code::peer_lost);
  });
}

// Rank 0 aborts; the others wait in a collective that it does not call, or for its message.
// A rank that was told of the others' introductions may be slow, and the others quick to leave.
void a_rank_may_leave_before_another_has_joined() {
  const int descriptors = open_descriptors();
  {
    SharedBuffers shared_buffers;
    std::array<Hub, 2> hubs;
    std::array<std::unique_ptr<Group>, 2> groups;
    std::vector<std::string> introductions;
    for (size_t rank = 0; rank < groups.size(); ++rank) {
      GroupOptions options;
      options.rank = static_cast<int>(rank);
      options.hosts = {0, 0};
      options.bind_address = "127.0.0.1";
      groups[rank] = std::make_unique<Group>(options, shared_buffers, hubs[rank]);
      introductions.push_back(groups[rank]->introduce());
    }
    for (auto& group : groups) {
      group->join(introductions, secret_of(7), Deadline::after(60));
      group->start(true);
      group.reset();
    }
  }
  CHECK_EQUAL(open_descriptors(), descriptors);
}

void an_abort_frees_every_rank_that_waits(const Hosts& hosts) {
  Groups groups(hosts);
  groups.run([&](Group& group) {
    if (group.rank() == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      return group.abort(Code::aborted, 0, "a test's reason");
    }
    std::vector<float> data(100'000);
    if (group.rank() == 1) {
      CHECK_THROWS(call(group, all_reduce_of(data, 60, Method::ring)), Code::aborted);
    } else {
      const auto message = group.receive(0, 0, data.data(), 4);
      CHECK_THROWS(group.wait(*message, Deadline::after(60)), Code::aborted);
    }
    CHECK_THROWS(call(group, all_reduce_of(data, 60, Method::ring)), Code::aborted);
  });
}

// No rank of one host comes. The failure names a rank even where links number hosts.
void time_that_ran_out_is_said_of_a_rank_that_did_not_come(const Hosts& hosts, Method algorithm, int absent) {
  Groups groups(hosts);
  std::atomic<int> failed{0};
  groups.run([&](Group& group) {
    if (hosts[static_cast<size_t>(group.rank())] == hosts[static_cast<size_t>(absent)]) {
      while (failed == 0) std::this_thread::yield();
      return;
    }
    std::vector<float> data(1000);
    try {
      call(group, all_reduce_of(data, 0.1, algorithm));
      CHECK(false);
    } catch (const Failure& failure) {
      CHECK_EQUAL(failure.code, Code::timeout);
      CHECK_EQUAL(hosts[static_cast<size_t>(failure.rank)], hosts[static_cast<size_t>(absent)]);
    }
    ++failed;
  });
}

void what_cannot_be_done_is_refused_and_the_group_goes_on() {
  Groups groups({0, 0});
  groups.run([&](Group& group) {
    std::vector<float> data(1000, 1);
    Operation wrong = all_reduce_of(data, 60, Method::direct);
    wrong.reduction = Reduction::bit_and;
    CHECK_THROWS(group.call(wrong, false), Code::invalid);
    wrong = all_reduce_of(data, 60, Method::direct);
    wrong.bytes = 5;
    CHECK_THROWS(group.call(wrong, false), Code::invalid);
    wrong.collective = Collective::broadcast;
    wrong.root = 2;
    CHECK_THROWS(group.call(wrong, false), Code::invalid);
    std::vector<float> large(Board::slot_bytes, 1);
    CHECK_THROWS(call(group, all_reduce_of(large, 60, Method::one_shot)), Code::invalid);
    CHECK_THROWS(group.send(group.rank(), 0, data.data(), 4), Code::invalid);
    CHECK_THROWS(group.receive(2, 0, data.data(), 4), Code::invalid);
    call(group, all_reduce_of(data, 60, Method::direct));
    CHECK_EQUAL(data[0], 2);
  });
}

Operation stripes_of(std::vector<float>& data, std::vector<Stripe> stripes) {
  Operation operation = all_reduce_of(data, 60, Method::direct);
  operation.collective = Collective::reduce_scatter;
  operation.stripes = std::move(stripes);
  return operation;
}

// 24 floats of two ranks: stripes that do not fit would be read and written outside of them.
void stripes_that_do_not_fit_are_refused_and_the_group_goes_on() {
  const std::vector<std::vector<Stripe>> wrong{
      {{0, 49}}, {{0, 52}}, {{92, 4}}, {{100, 0}}, {{0, SIZE_MAX}},   // not within the buffer
      {{2, 8}},  {{0, 6}},                                            // not of whole elements
      {{0, 8}, {12, 4}}, {{48, 8}, {0, 8}},                           // overlap, or are not in order
  };
  Groups groups({0, 0});
  groups.run([&](Group& group) {
    std::vector<float> data(24, 1), elsewhere(24);
    for (const auto& stripes : wrong) CHECK_THROWS(group.call(stripes_of(data, stripes), false), Code::invalid);
    Operation operation = stripes_of(data, {{0, 8}});
    operation.output = elsewhere.data();
    CHECK_THROWS(group.call(operation, false), Code::invalid);
    operation = stripes_of(data, {{0, 8}});
    operation.algorithm = Method::ring;
    CHECK_THROWS(group.call(operation, false), Code::invalid);
    operation = stripes_of(data, {{0, 8}});
    operation.collective = Collective::all_reduce;
    CHECK_THROWS(group.call(operation, false), Code::invalid);

    call(group, stripes_of(data, {}));
    CHECK(data == std::vector<float>(24, 1));
    call(group, stripes_of(data, {{0, 8}, {16, 40}}));
    std::vector<float> wanted(24, 1);
    const int own = group.rank();
    std::fill_n(wanted.begin() + 2 * own, 2, 2.0F);
    std::fill_n(wanted.begin() + 4 + 10 * own, 10, 2.0F);
    CHECK(data == wanted);
  });
  Groups apart({0, 1});
  apart.run([&](Group& group) {
    std::vector<float> data(24, 1);
    CHECK_THROWS(group.call(stripes_of(data, {{0, 8}}), false), Code::invalid);
  });
}

void nothing_is_left_of_groups_that_were_closed(const Hosts& hosts) {
  const int size = static_cast<int>(hosts.size());
  int descriptors = 0;
  for (int round = 0; round < 10; ++round) {
    {
      std::vector<std::vector<float>> data(hosts.size(), std::vector<float>(50'000, 1));
      Groups groups(hosts);  // which use the data until they are destroyed
      groups.run([&](Group& group) {
        std::vector<float>& own = data[static_cast<size_t>(group.rank())];
        call(group, all_reduce_of(own, 60, Method::ring));
        // An operation and messages that no other rank ever calls.
        if (group.rank() == round % size) {
          group.call(all_reduce_of(own, 60, Method::direct), true);
          group.send((group.rank() + 1) % size, 0, own.data(), own.size());
          group.receive((group.rank() + 1) % size, 0, own.data(), own.size());
        }
        if (round % 2 == 0) groups.close(group.rank());  // all at once, and otherwise one by one
      });
    }
    if (round == 0) descriptors = open_descriptors();
  }
  CHECK_EQUAL(open_descriptors(), descriptors);
}

}  // namespace

int main() {
  for (const Hosts& hosts : layouts) {
    for (const bool reads_peers : {true, false}) {
      programs_give_what_the_reference_gives(hosts, reads_peers, static_cast<unsigned>(hosts.size()));
    }
  }
  for (const Hosts& hosts : {Hosts{0, 0}, Hosts{0, 0, 0}, Hosts{0, 1}, Hosts{0, 0, 1}}) {
    messages_and_collectives_do_not_disturb_each_other(hosts);
    messages_of_a_rank_that_left_are_received(hosts);
    an_abort_frees_every_rank_that_waits(hosts);
    nothing_is_left_of_groups_that_were_closed(hosts);
  }
  time_that_ran_out_is_said_of_a_rank_that_did_not_come({0, 0, 1, 1}, Method::hierarchical, 2);
  time_that_ran_out_is_said_of_a_rank_that_did_not_come({0, 1}, Method::direct, 1);
  a_rank_may_leave_before_another_has_joined();
  what_cannot_be_done_is_refused_and_the_group_goes_on();
  stripes_that_do_not_fit_are_refused_and_the_group_goes_on();
  return report();
}
