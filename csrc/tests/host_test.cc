// The collectives within a host, one-shot and direct, against a plain reference: random programs, which all ranks
// run without anything between the operations.
#include "algorithms/host.h"

#include <random>

#include "algorithms/hierarchical.h"
#include "tests/check.h"
#include "tests/collectives.h"
#include "tests/host_ranks.h"

using namespace shoal;
using namespace shoal::testing;

namespace {

using Method = shoal::Algorithm;

// Where a rank's buffers are.
enum class Placement { own, shared, mixed };

constexpr Kind kinds[] = {Kind::all_reduce, Kind::all_gather, Kind::reduce_scatter, Kind::broadcast,
                          Kind::reduce,     Kind::gather,     Kind::scatter,        Kind::all_to_all};

Collective collective_of(Kind kind) {
  switch (kind) {
    case Kind::all_reduce:
      return Collective::all_reduce;
    case Kind::all_gather:
      return Collective::all_gather;
    case Kind::reduce_scatter:
      return Collective::reduce_scatter;
    case Kind::broadcast:
      return Collective::broadcast;
    case Kind::reduce:
      return Collective::reduce;
    case Kind::gather:
      return Collective::gather;
    case Kind::scatter:
      return Collective::scatter;
    case Kind::all_to_all:
      return Collective::all_to_all;
  }
  return Collective::barrier;
}

// Elements in memory of a rank, private or shared; null if there are none.
class Elements {
 public:
  Elements(const std::vector<uint32_t>& values, SharedBuffers& buffers, bool is_shared)
      : buffers_(buffers), count_(values.size()), is_shared_(is_shared && count_ > 0) {
    if (is_shared_) {
      data_ = static_cast<uint32_t*>(buffers_.allocate(count_ * sizeof(uint32_t)));
    } else if (count_ > 0) {
      own_.resize(count_);
      data_ = own_.data();
    }
    std::copy(values.begin(), values.end(), data_);
  }
  ~Elements() {
    if (is_shared_) buffers_.release(data_);
  }
  Elements(const Elements&) = delete;

  uint32_t* data() { return data_; }
  std::vector<uint32_t> values() const { return {data_, data_ + count_}; }

 private:
  SharedBuffers& buffers_;
  const size_t count_;
  const bool is_shared_;
  std::vector<uint32_t> own_;
  uint32_t* data_ = nullptr;
};

struct Case {
  Kind kind;
  Problem problem;
  Method method;
  Placement placement;
  bool in_place;  // of an all-reduce, which may also have its input elsewhere
};

bool is_shared(Placement placement, int index) {
  return placement == Placement::shared || (placement == Placement::mixed && index % 2 == 0);
}

void run_case(const Case& given, HostRank& rank) {
  const Problem& problem = given.problem;
  const auto own = static_cast<size_t>(rank.index);
  Buffers buffers = make_buffers(given.kind, own, problem);
  const bool moves_in_place = given.kind == Kind::all_reduce || given.kind == Kind::broadcast;
  const bool in_place = moves_in_place && (given.in_place || given.kind == Kind::broadcast);
  if (moves_in_place && !in_place) buffers.input = buffers.output;
  const bool shared = is_shared(given.placement, rank.index);
  Elements input(buffers.input, rank.shared_buffers, shared);
  Elements output(buffers.output, rank.shared_buffers, shared);
  Operation operation;
  operation.collective = collective_of(given.kind);
  operation.algorithm = given.method;
  operation.dtype = Dtype::int32;
  operation.root = problem.root;
  operation.input = in_place ? output.data() : input.data();
  operation.output = output.data();
  operation.bytes = problem.bytes();
  operation.deadline = Deadline::after(60);
  if (given.kind == Kind::all_to_all) {
    for (size_t peer = 0; peer < problem.ranks(); ++peer) {
      operation.send_bytes.push_back(problem.count_between(own, peer) * sizeof(uint32_t));
      operation.receive_bytes.push_back(problem.count_between(peer, own) * sizeof(uint32_t));
    }
  }
  if (given.method == Method::one_shot && fits_one_shot(operation, problem.size)) {
    begin_one_shot(operation, rank.host);
    finish_one_shot(operation, rank.host);
  } else if (given.method == Method::hierarchical && given.kind == Kind::all_reduce) {
    const int slices = 1 + problem.root;
    run_hierarchical_all_reduce(operation, rank.host, slices, [](std::byte*, size_t) {});
  } else {
    run_direct(operation, rank.host);
  }
  const std::vector<uint32_t> wanted = expected_output(given.kind, own, problem);
  CHECK(output.values() == wanted);
  if (!in_place) CHECK(input.values() == buffers.input);
}

std::vector<Case> random_cases(int size, unsigned seed, int count) {
  std::mt19937 random(seed);
  const auto pick = [&](const auto& options) { return options[random() % std::size(options)]; };
  constexpr size_t counts[] = {0, 1, 2, 15, 16, 17, 1000, 4099, 33'000, 70'001};
  constexpr Method methods[] = {Method::one_shot, Method::direct, Method::direct, Method::hierarchical};
  constexpr Placement placements[] = {Placement::own, Placement::shared, Placement::mixed};
  std::vector<Case> cases;
  for (int index = 0; index < count; ++index) {
    const int root = static_cast<int>(random() % static_cast<unsigned>(size));
    cases.push_back({pick(kinds), {size, root, pick(counts), 0}, pick(methods), pick(placements), random() % 2 == 0});
  }
  return cases;
}

void collectives_give_what_the_reference_gives(int size, bool reads_peers, uint32_t first_tick) {
  HostRanks ranks(size, {.first_tick = first_tick, .reads_peers = reads_peers});
  const auto cases = random_cases(size, static_cast<unsigned>(2 * size + reads_peers), 120);
  ranks.run([&](HostRank& rank) {
    try {
      for (const Case& each : cases) run_case(each, rank);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "rank %d: %s\n", rank.index, error.what());
      CHECK(false);
    }
  });
}

// The results lie where the inputs were, in the parts that are the rank's own.
void parts_may_be_in_place(bool reads_peers) {
  constexpr int size = 3;
  constexpr size_t count = 5000;
  HostRanks ranks(size, {.reads_peers = reads_peers});
  ranks.run([&](HostRank& rank) {
    const auto own = static_cast<size_t>(rank.index);
    const Problem problem{size, 0, count, 0};
    Operation operation;
    operation.dtype = Dtype::int32;
    operation.bytes = problem.bytes();
    operation.deadline = Deadline::after(60);

    std::vector<uint32_t> whole = elements_of(own, size * count);
    operation.collective = Collective::reduce_scatter;
    operation.input = whole.data();
    operation.output = whole.data() + own * count;
    run_direct(operation, rank.host);
    const auto sums = expected_output(Kind::reduce_scatter, own, problem);
    CHECK(std::equal(sums.begin(), sums.end(), whole.begin() + static_cast<std::ptrdiff_t>(own * count)));

    const std::vector<uint32_t> part = elements_of(own, count);
    std::copy(part.begin(), part.end(), whole.begin() + static_cast<std::ptrdiff_t>(own * count));
    operation.collective = Collective::all_gather;
    operation.input = whole.data() + own * count;
    operation.output = whole.data();
    run_direct(operation, rank.host);
    CHECK(whole == expected_output(Kind::all_gather, own, problem));
  });
}

void parts_of_the_wrong_size_are_named() {
  HostRanks ranks(2);
  ranks.run([&](HostRank& rank) {
    std::vector<uint8_t> data(64);
    Operation operation;
    operation.collective = Collective::all_to_all;
    operation.input = operation.output = data.data();
    operation.send_bytes = {8, 8};
    operation.receive_bytes = {rank.index == 0 ? size_t{8} : size_t{16}, 8};
    operation.deadline = Deadline::after(0.5);  // rank 0 waits for rank 1, as nobody raises the alarm here
    CHECK_THROWS(run_direct(operation, rank.host), rank.index == 0 ? Code::timeout : Code::mismatch);
  });
}

void an_alarm_ends_a_collective_that_others_never_call() {
  HostRanks ranks(2);
  HostRank& rank = ranks[0];
  std::vector<float> data(100'000);
  Operation operation;
  operation.collective = Collective::all_reduce;
  operation.dtype = Dtype::float32;
  operation.input = operation.output = data.data();
  operation.bytes = data.size() * sizeof(float);
  std::thread caller([&] { CHECK_THROWS(run_direct(operation, rank.host), Code::peer_lost); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  rank.alarm.raise(Code::peer_lost, 1, "gone");
  rank.board.wake_sleepers();
  caller.join();
}

}  // namespace

int main() {
  for (int size = 1; size <= 5; ++size) {
    for (const bool reads_peers : {true, false}) {
      collectives_give_what_the_reference_gives(size, reads_peers, 0);
    }
  }
  collectives_give_what_the_reference_gives(3, false, UINT32_MAX - 100);
  for (const bool reads_peers : {true, false}) parts_may_be_in_place(reads_peers);
  parts_of_the_wrong_size_are_named();
  an_alarm_ends_a_collective_that_others_never_call();
  return report();
}
