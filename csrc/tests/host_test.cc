// The collectives within a host, one-shot and direct, against a plain reference: random programs, which all ranks run
// without pauses between the operations.
#include "algorithms/host.h"

#include <cmath>
#include <random>

#include "algorithms/hierarchical.h"
#include "tests/calls.h"
#include "tests/check.h"
#include "tests/host_ranks.h"

using namespace shoal;
using namespace shoal::testing;

namespace {

using Method = shoal::Algorithm;

// Where ranks' buffers are: in private memory, in shared buffers, in one on some ranks and in the other on
// the rest.
enum class Placement { own, shared, mixed };

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
  Buffers buffers = make_buffers(given.kind, static_cast<size_t>(rank.index), problem);
  const bool moves_in_place = given.kind == Kind::all_reduce || given.kind == Kind::broadcast;
  const bool in_place = moves_in_place && (given.in_place || given.kind == Kind::broadcast);
  if (moves_in_place && !in_place) buffers.input = buffers.output;
  const bool shared = is_shared(given.placement, rank.index);
  Elements input(buffers.input, rank.host.shared_buffers, shared);
  Elements output(buffers.output, rank.host.shared_buffers, shared);
  const Operation operation =
      operation_of(given.kind, problem, rank.index, in_place ? output.data() : input.data(), output.data());
  if (given.method == Method::one_shot && fits_one_shot(operation, problem.size)) {
    begin_one_shot(operation, rank.host);
    finish_one_shot(operation, rank.host);
  } else if (given.method == Method::hierarchical && given.kind == Kind::all_reduce) {
    const int slices = 1 + problem.root;
    run_hierarchical_all_reduce(operation, rank.host, slices, [](std::byte*, size_t) {});
  } else {
    run_direct(operation, rank.host);
  }
  CHECK(output.values() == expected_output(given.kind, static_cast<size_t>(rank.index), problem));
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
    const Problem problem{size, root, pick(counts), 0};
    cases.push_back({pick(kinds), problem, pick(methods), pick(placements), random() % 2 == 0});
  }
  return cases;
}

void collectives_give_what_the_reference_gives(int size, const HostOptions& options) {
  HostRanks ranks(size, options);
  const auto cases = random_cases(size, static_cast<unsigned>(2 * size + options.reads_peers), 120);
  ranks.run([&](HostRank& rank) {
    try {
      for (const Case& each : cases) run_case(each, rank);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "rank %d: %s\n", rank.index, error.what());
      CHECK(false);
    }
  });
}

// For any number of blocks, and any buffers in slots: the same bits on every rank.
void an_all_reduce_folds_floats_in_the_order_of_ranks(int size, size_t block_bytes) {
  HostRanks ranks(size, {.most_block_bytes = block_bytes});
  ranks.run([&](HostRank& rank) {
    std::mt19937 random(1);
    for (const size_t count : {size_t{1}, size_t{100}, size_t{5000}, size_t{20'001}}) {
      std::vector<float> wanted(count), given;
      for (int index = 0; index < size; ++index) {
        std::vector<float> of_rank(count);
        for (float& each : of_rank) each = std::ldexp(static_cast<float>(random() % 2000) - 1000, random() % 20);
        for (size_t at = 0; at < count; ++at) wanted[at] = index == 0 ? of_rank[at] : wanted[at] + of_rank[at];
        if (index == rank.index) given = of_rank;
      }
      for (const Placement placement : {Placement::own, Placement::mixed, Placement::shared}) {
        const bool shared = is_shared(placement, rank.index);
        const size_t bytes = count * sizeof(float);
        std::vector<float> own = given;
        float* const data =
            shared ? static_cast<float*>(rank.host.shared_buffers.allocate(bytes)) : own.data();
        std::copy(given.begin(), given.end(), data);
        Operation operation;
        operation.collective = Collective::all_reduce;
        operation.dtype = Dtype::float32;
        operation.input = operation.output = data;
        operation.bytes = bytes;
        operation.deadline = Deadline::after(60);
        run_direct(operation, rank.host);
        CHECK(std::equal(wanted.begin(), wanted.end(), data));
        if (shared) rank.host.shared_buffers.release(data);
      }
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

// Tensors in one buffer, with gaps between them; of some the parts are empty.
std::vector<Stripe> random_stripes(std::mt19937& random, size_t size, size_t unit, size_t& bytes) {
  constexpr size_t counts[] = {0, 1, 15, 16, 17, 1000, 33'000, 150'001};
  std::vector<Stripe> stripes(random() % 6);
  bytes = 0;
  for (Stripe& stripe : stripes) {
    bytes += random() % 3 * unit;
    stripe = {bytes, counts[random() % std::size(counts)] * unit};
    bytes += size * stripe.part_bytes;
  }
  bytes += random() % 3 * unit;
  return stripes;
}

// The expected buffer of the rank: only its own parts, or those of the others, have changed.
std::vector<uint32_t> expected_stripes(const Operation& op, size_t own, size_t size, size_t count) {
  std::vector<std::vector<uint32_t>> given;
  for (size_t peer = 0; peer < size; ++peer) given.push_back(elements_of(peer, count));
  std::vector<uint32_t> wanted = given[own];
  for (const Stripe& stripe : *op.stripes) {
    for (size_t peer = 0; peer < size; ++peer) {
      const size_t offset = stripe.offset + peer * stripe.part_bytes;
      if (op.collective == Collective::all_gather) {
        const auto* from = reinterpret_cast<const std::byte*>(given[peer].data());
        std::copy_n(from + offset, stripe.part_bytes, reinterpret_cast<std::byte*>(wanted.data()) + offset);
      } else if (peer == own) {
        for (size_t index = offset / 4; index < (offset + stripe.part_bytes) / 4; ++index) {
          wanted[index] = 0;
          for (const auto& each : given) wanted[index] += each[index];
        }
      }
    }
  }
  return wanted;
}

void stripes_give_what_the_reference_gives(int size, bool reads_peers) {
  HostRanks ranks(size, {.reads_peers = reads_peers});
  ranks.run([&](HostRank& rank) {
    std::mt19937 random(static_cast<unsigned>(size));
    for (int turn = 0; turn < 60; ++turn) {
      Operation operation;
      const bool gathers = random() % 2 == 0;
      operation.collective = gathers ? Collective::all_gather : Collective::reduce_scatter;
      operation.algorithm = Method::direct;
      operation.dtype = Dtype::int32;
      operation.deadline = Deadline::after(60);
      const size_t unit = gathers && random() % 2 == 0 ? 1 : sizeof(uint32_t);  // moved elements may have any size
      operation.stripes = random_stripes(random, static_cast<size_t>(size), unit, operation.bytes);
      operation.bytes = (operation.bytes + 3) / 4 * 4;
      const size_t count = operation.bytes / 4;
      const auto placement = static_cast<Placement>(random() % 3);
      const auto own = static_cast<size_t>(rank.index);
      Elements buffer(elements_of(own, count), rank.host.shared_buffers, is_shared(placement, rank.index));
      operation.input = operation.output = buffer.data();
      require_possible(operation, size, true);
      run_direct(operation, rank.host);
      CHECK(buffer.values() == expected_stripes(operation, own, static_cast<size_t>(size), count));
    }
  });
}

void parts_of_the_wrong_size_are_named() {
  HostRanks ranks(2);
  ranks.run([&](HostRank& rank) {
    // Not a copy, which would be gone with the failing rank before the other one has opened it.
    void* const data = ranks.shared_buffers().allocate(64);
    Operation operation;
    operation.collective = Collective::all_to_all;
    operation.input = operation.output = data;
    operation.send_bytes = {8, 8};
    operation.receive_bytes = {rank.index == 0 ? size_t{8} : size_t{16}, 8};
    operation.deadline = Deadline::after(0.5);  // rank 0 waits for rank 1, as no thread raises the alarm here
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
      collectives_give_what_the_reference_gives(size, {.reads_peers = reads_peers});
    }
  }
  collectives_give_what_the_reference_gives(3, {.first_tick = UINT32_MAX - 100, .reads_peers = false});
  collectives_give_what_the_reference_gives(4, {.most_block_bytes = 5000});
  for (const size_t block_bytes : {size_t{1}, Board::slot_bytes}) {
    for (const int size : {2, 5}) an_all_reduce_folds_floats_in_the_order_of_ranks(size, block_bytes);
  }
  for (const bool reads_peers : {true, false}) {
    parts_may_be_in_place(reads_peers);
    for (int size = 1; size <= 5; ++size) stripes_give_what_the_reference_gives(size, reads_peers);
  }
  parts_of_the_wrong_size_are_named();
  an_alarm_ends_a_collective_that_others_never_call();
  return report();
}
