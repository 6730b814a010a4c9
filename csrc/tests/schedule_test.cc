// The schedules of all algorithms: right for any order of events, and with the messages and bytes of their
// formulas.

#include "algorithms/schedule.h"

#include <cmath>
#include <random>

#include "algorithms/slice.h"
#include "tests/check.h"
#include "tests/collectives.h"
#include "tests/count.h"
#include "tests/simulation.h"

using namespace shoal;
using namespace shoal::testing;

namespace {

template <class Element>
Memory memory_of(const std::vector<Element>& input, std::vector<Element>& output) {
  const auto bytes = [](const auto& elements) { return elements.size() * sizeof(Element); };
  return {reinterpret_cast<const std::byte*>(input.data()), bytes(input),
          reinterpret_cast<std::byte*>(output.data()), bytes(output)};
}

std::vector<Schedule> schedules_of(const Algorithm& algorithm, const Problem& problem) {
  std::vector<Schedule> schedules;
  for (int rank = 0; rank < problem.size; ++rank) schedules.push_back(algorithm.make(rank, problem));
  return schedules;
}

std::string describe(const Algorithm& algorithm, const Problem& problem) {
  return algorithm.name + ", " + std::to_string(problem.size) + " ranks, root " +
         std::to_string(problem.root) + ", " + std::to_string(problem.count) + " elements, chunks of " +
         std::to_string(problem.chunk);
}

// Runs the algorithm in the simulation, checks the result of every rank, and returns the length of its critical path.
int check_outputs(const Algorithm& algorithm, const Problem& problem, size_t capacity, unsigned seed) {
  std::vector<Buffers> buffers;
  std::vector<Memory> memories;
  for (size_t rank = 0; rank < problem.ranks(); ++rank) {
    buffers.push_back(make_buffers(algorithm.kind, rank, problem));
  }
  for (Buffers& own : buffers) memories.push_back(memory_of(own.input, own.output));
  Simulation simulation(schedules_of(algorithm, problem), memories, Dtype::int32, capacity, seed);
  std::string found;
  try {
    simulation.run();
    for (size_t rank = 0; rank < problem.ranks(); ++rank) {
      if (buffers[rank].output != expected_output(algorithm.kind, rank, problem)) found = "a wrong result";
    }
  } catch (const Failure& failure) {
    found = failure.what();
  }
  if (!found.empty()) found += ": " + describe(algorithm, problem);
  CHECK_EQUAL(found, "");
  return simulation.critical_messages();
}

const std::vector<int> sizes{1, 2, 3, 4, 5, 6, 7, 8, 9, 16};

void every_algorithm_agrees_with_the_reference() {
  struct Cut {
    size_t chunk, capacity;
  };
  unsigned seed = 0;
  for (const Algorithm& algorithm : algorithms()) {
    for (const int size : sizes) {
      for (const size_t count : {0, 1, 5, 64, 200}) {
        for (const Cut cut : {Cut{16, 7}, Cut{100, 50}, Cut{1 << 20, 1 << 20}}) {
          ++seed;
          check_outputs(algorithm, {size, static_cast<int>(seed) % size, count, cut.chunk}, cut.capacity,
                        seed);
        }
      }
    }
  }
}

void no_order_of_events_gives_another_result() {
  for (const Algorithm& algorithm : algorithms()) {
    for (const int size : {2, 3, 5, 6}) {
      for (unsigned seed = 0; seed < 60; ++seed) {
        check_outputs(algorithm, {size, static_cast<int>(seed) % size, 120, 32}, seed % 2 == 0 ? 8 : 200,
                      seed);
      }
    }
  }
}

int log2_up(int n) {
  int log = 0;
  while ((1 << log) < n) ++log;
  return log;
}

int log2_down(int n) { return log2_up(n + 1) - 1; }

// The largest traffic of a rank, sent and received.
struct Busiest {
  Traffic sent, received;
};

Busiest busiest(const Algorithm& algorithm, const Problem& problem) {
  const auto larger = [](const Traffic& a, const Traffic& b) {
    return Traffic{std::max(a.messages, b.messages), std::max(a.bytes, b.bytes)};
  };
  Busiest found;
  for (const Schedule& schedule : schedules_of(algorithm, problem)) {
    found.sent = larger(found.sent, count(schedule).all_sent());
    found.received = larger(found.received, count(schedule).all_received());
  }
  return found;
}

// Whole buffers of S bytes that divide into slices; one chunk each, so a step is a message.
void messages_and_bytes_are_those_of_the_formulas() {
  for (const int size : sizes) {
    if (size == 1) continue;
    const auto n = static_cast<size_t>(size);
    const auto log = static_cast<size_t>(log2_up(size));
    const size_t slice_count = line_bytes / sizeof(int32_t) * 6;  // halves of whole lines for the double tree
    const size_t part = slice_count * sizeof(int32_t), whole = n * part;
    const Problem in_slices{size, 0, n * slice_count, whole};  // of a whole buffer
    const Problem in_parts{size, 0, slice_count, whole};       // of one part per rank

    const auto check = [](const Algorithm& algorithm, const Problem& problem, Traffic sent,
                          Traffic received) {
      const Busiest found = busiest(algorithm, problem);
      const std::string text = describe(algorithm, problem);
      CHECK_EQUAL(text + ": " + std::to_string(found.sent.bytes), text + ": " + std::to_string(sent.bytes));
      CHECK_EQUAL(text + ": " + std::to_string(found.sent.messages),
                  text + ": " + std::to_string(sent.messages));
      CHECK_EQUAL(found.received.bytes, received.bytes);
      CHECK_EQUAL(found.received.messages, received.messages);
    };
    const auto check_symmetric = [&](const char* name, const Problem& problem, Traffic traffic) {
      check(algorithm(name), problem, traffic, traffic);
    };
    check_symmetric("ring all-reduce", in_slices, {2 * (n - 1), 2 * (n - 1) * part});
    check_symmetric("ring all-gather", in_parts, {n - 1, (n - 1) * part});
    check_symmetric("ring reduce-scatter", in_parts, {n - 1, (n - 1) * part});
    check_symmetric("one-shot all-reduce", in_slices, {n - 1, (n - 1) * whole});
    check_symmetric("two-shot all-reduce", in_slices, {2 * (n - 1), 2 * (n - 1) * part});
    check_symmetric("direct all-gather", in_parts, {n - 1, (n - 1) * part});
    check_symmetric("direct reduce-scatter", in_parts, {n - 1, (n - 1) * part});
    check(algorithm("tree broadcast"), in_slices, {log, log * whole}, {1, whole});
    check(algorithm("tree reduce"), in_slices, {1, whole}, {log, log * whole});
    check_symmetric("chain broadcast", in_slices, {1, whole});
    check_symmetric("chain reduce", in_slices, {1, whole});
    check(algorithm("direct gather"), in_parts, {1, part}, {n - 1, (n - 1) * part});
    check(algorithm("direct scatter"), in_parts, {n - 1, (n - 1) * part}, {1, part});

    // Halving and doubling: the formula's bytes for every rank; a message over the buffer's end counts as
    // two.
    for (const auto& [name, problem, rounds, bytes] :
         {std::tuple{"halving-doubling all-reduce", in_slices, 2 * log, 2 * (n - 1) * part},
          std::tuple{"recursive all-gather", in_parts, log, (n - 1) * part},
          std::tuple{"recursive reduce-scatter", in_parts, log, (n - 1) * part}}) {
      for (const Schedule& schedule : schedules_of(algorithm(name), problem)) {
        CHECK_EQUAL(count(schedule).all_sent().bytes, bytes);
        CHECK_EQUAL(count(schedule).all_received().bytes, bytes);
        CHECK(count(schedule).all_sent().messages >= rounds);
        CHECK(count(schedule).all_sent().messages <= 2 * rounds);
      }
    }

    // Double tree: no rank sends or receives more than 2 S, and all ranks together as much as two passes over a tree.
    size_t sent = 0;
    for (const Schedule& schedule : schedules_of(algorithm("double tree all-reduce"), in_slices)) {
      CHECK(count(schedule).all_sent().bytes <= 2 * whole);
      CHECK(count(schedule).all_received().bytes <= 2 * whole);
      sent += count(schedule).all_sent().bytes;
    }
    CHECK_EQUAL(sent, 2 * (n - 1) * whole);
  }
}

void as_many_messages_follow_one_another_as_the_formulas_say() {
  for (const int size : sizes) {
    const Problem problem{size, size / 2, 64 * static_cast<size_t>(size), 1 << 20};
    const int log = log2_up(size), others = size - 1, one = size > 1 ? 1 : 0;
    for (const auto& [name, messages] : {
             std::pair{"ring all-reduce", 2 * others},
             std::pair{"ring all-gather", others},
             std::pair{"ring reduce-scatter", others},
             std::pair{"halving-doubling all-reduce", 2 * log},
             std::pair{"recursive all-gather", log},
             std::pair{"recursive reduce-scatter", log},
             std::pair{"double tree all-reduce", 2 * log2_down(size)},
             std::pair{"one-shot all-reduce", one},
             std::pair{"two-shot all-reduce", 2 * one},
             std::pair{"direct all-gather", one},
             std::pair{"direct reduce-scatter", one},
             std::pair{"tree broadcast", log2_down(size)},  // its root has log2_up(size) to send, though
             std::pair{"tree reduce", log2_down(size)},
             std::pair{"chain broadcast", others},
             std::pair{"chain reduce", others},
             std::pair{"direct gather", one},
             std::pair{"direct scatter", one},
             std::pair{"pairwise all-to-all", one},
         }) {
      const int found = check_outputs(algorithm(name), problem, 1 << 20, 1);
      CHECK_EQUAL(describe(algorithm(name), problem) + ": " + std::to_string(found),
                  describe(algorithm(name), problem) + ": " + std::to_string(messages));
    }
  }
}

void no_step_is_longer_than_a_chunk_where_there_are_chunks() {
  for (const char* name :
       {"ring all-reduce", "ring all-gather", "ring reduce-scatter", "double tree all-reduce",
        "one-shot all-reduce", "tree broadcast", "tree reduce", "chain broadcast", "chain reduce"}) {
    const Problem problem{5, 0, 5000, 1000};
    for (const Schedule& schedule : schedules_of(algorithm(name), problem)) {
      for (const Step& step : schedule.steps) {
        CHECK(step.kind == Step::Kind::copy || step.region.bytes <= problem.chunk);
      }
    }
  }
}

void scratch_does_not_grow_with_the_buffer_where_there_are_chunks() {
  constexpr size_t chunk = 1024;
  for (const size_t count : {100000, 200000}) {
    const Problem problem{4, 0, count, chunk};
    const auto most = [&](const char* name) {
      size_t bytes = 0;
      for (const Schedule& schedule : schedules_of(algorithm(name), problem)) {
        bytes = std::max(bytes, schedule.scratch_bytes);
      }
      return bytes;
    };
    for (const char* name : {"ring all-reduce", "halving-doubling all-reduce", "double tree all-reduce",
                             "ring all-gather", "recursive all-gather", "direct all-gather", "tree broadcast",
                             "chain broadcast", "pairwise all-to-all", "direct gather", "direct scatter"}) {
      CHECK_EQUAL(most(name), 0);
    }
    CHECK_EQUAL(most("ring reduce-scatter"), 10 * chunk);
    CHECK_EQUAL(most("tree reduce"), 4 * chunk);
    CHECK_EQUAL(most("chain reduce"), 4 * chunk);
    for (const char* name : {"one-shot all-reduce", "two-shot all-reduce", "direct reduce-scatter"}) {
      CHECK_EQUAL(most(name), 2 * 4 * chunk);
    }
    CHECK_EQUAL(most("recursive reduce-scatter"), 2 * problem.bytes());
  }
}

void cuts_fall_on_lines_and_never_inside_an_element() {
  for (const size_t element : {1, 2, 4, 8, 12}) {
    for (const size_t elements : {0, 1, 3, 40, 1000, 4097}) {
      for (const int parts : {1, 2, 3, 7, 16}) {
        const size_t bytes = elements * element;
        const auto boundaries = slice_boundaries(bytes, element, parts);
        CHECK_EQUAL(boundaries.size(), parts + 1);
        CHECK_EQUAL(boundaries.front(), 0);
        CHECK_EQUAL(boundaries.back(), bytes);
        for (size_t i = 1; i < boundaries.size(); ++i) {
          CHECK(boundaries[i - 1] <= boundaries[i]);
          CHECK_EQUAL(boundaries[i] % element, 0);
          CHECK(boundaries[i] == bytes || element == 12 || boundaries[i] % line_bytes == 0);
          CHECK((boundaries[i] - boundaries[i - 1]) * static_cast<size_t>(parts) <
                bytes + 2 * line_bytes * static_cast<size_t>(parts));
        }
      }
    }
    CHECK_EQUAL(chunk_bytes(element, 1), element);
    CHECK_EQUAL(chunk_bytes(element, 1000) % element, 0);
    CHECK(chunk_bytes(element, 1000) <= 1000);
  }
}

// Floats whose sum depends on the order in which they are added.
std::vector<std::vector<float>> awkward_floats(size_t ranks, size_t count) {
  std::mt19937 random(7);
  std::vector<std::vector<float>> all(ranks, std::vector<float>(count));
  for (auto& own : all) {
    for (float& element : own) {
      const auto mantissa = static_cast<float>(random() % 2000) - 1000;
      element = std::ldexp(mantissa, static_cast<int>(random() % 20));
    }
  }
  return all;
}

std::vector<std::vector<float>> all_reduce(const Algorithm& algorithm, const Problem& problem,
                                           unsigned seed) {
  auto outputs = awkward_floats(problem.ranks(), problem.count);
  const std::vector<float> no_input;
  std::vector<Memory> memories;
  for (auto& output : outputs) memories.push_back(memory_of(no_input, output));
  Simulation(schedules_of(algorithm, problem), memories, Dtype::float32, 64, seed).run();
  return outputs;
}

void floats_have_the_same_bits_on_every_rank_and_from_run_to_run() {
  for (const Algorithm& algorithm : algorithms()) {
    if (algorithm.kind != Kind::all_reduce) continue;
    for (const int size : {2, 3, 4, 6, 7}) {
      const Problem problem{size, 0, 300, 128};
      const auto first = all_reduce(algorithm, problem, 1);
      for (const auto& output : first) CHECK(output == first.front());
      for (unsigned seed = 2; seed < 6; ++seed) CHECK(all_reduce(algorithm, problem, seed) == first);
    }
  }
}

void one_shot_and_two_shot_fold_in_the_order_of_ranks() {
  const Problem problem{5, 0, 300, 128};
  std::vector<float> sums(problem.count);
  for (const auto& own : awkward_floats(problem.ranks(), problem.count)) {
    for (size_t index = 0; index < problem.count; ++index) sums[index] += own[index];
  }
  for (const char* name : {"one-shot all-reduce", "two-shot all-reduce"}) {
    CHECK(all_reduce(algorithm(name), problem, 1).front() == sums);
  }
}

void an_all_gather_and_a_reduce_scatter_may_be_in_place() {
  for (const char* name : {"ring all-gather", "recursive all-gather", "direct all-gather",
                           "ring reduce-scatter", "recursive reduce-scatter", "direct reduce-scatter"}) {
    const Algorithm& tested = algorithm(name);
    const Problem problem{5, 0, 50, 64};
    const bool gathers = tested.kind == Kind::all_gather;
    std::vector<std::vector<uint32_t>> buffers;
    std::vector<Memory> memories;
    for (size_t rank = 0; rank < problem.ranks(); ++rank) {
      const Buffers apart = make_buffers(tested.kind, rank, problem);
      buffers.push_back(gathers ? apart.output : apart.input);
      if (gathers)
        std::copy(apart.input.begin(), apart.input.end(),
                  buffers[rank].begin() + 50 * static_cast<long>(rank));
    }
    for (size_t rank = 0; rank < problem.ranks(); ++rank) {
      const Memory whole = memory_of(buffers[rank], buffers[rank]);
      const size_t offset = rank * problem.bytes();
      memories.push_back(
          gathers ? Memory{whole.input + offset, problem.bytes(), whole.output, whole.output_bytes}
                  : Memory{whole.input, whole.input_bytes, whole.output + offset, problem.bytes()});
    }
    Simulation(schedules_of(tested, problem), memories, Dtype::int32, 64, 3).run();
    for (size_t rank = 0; rank < problem.ranks(); ++rank) {
      const auto wanted = expected_output(tested.kind, rank, problem);
      const auto* const found = reinterpret_cast<const uint32_t*>(memories[rank].output);
      CHECK(std::equal(wanted.begin(), wanted.end(), found));
    }
  }
}

}  // namespace

int main() {
  every_algorithm_agrees_with_the_reference();
  no_order_of_events_gives_another_result();
  messages_and_bytes_are_those_of_the_formulas();
  as_many_messages_follow_one_another_as_the_formulas_say();
  no_step_is_longer_than_a_chunk_where_there_are_chunks();
  scratch_does_not_grow_with_the_buffer_where_there_are_chunks();
  cuts_fall_on_lines_and_never_inside_an_element();
  floats_have_the_same_bits_on_every_rank_and_from_run_to_run();
  one_shot_and_two_shot_fold_in_the_order_of_ranks();
  an_all_gather_and_a_reduce_scatter_may_be_in_place();
  return report();
}
