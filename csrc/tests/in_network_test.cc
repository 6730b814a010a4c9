// In-network all-reduce: right for any order of events and any ranks per host, with each byte once up and once down.
#include "algorithms/in_network.h"

#include <numeric>
#include <string>

#include "tests/check.h"
#include "tests/simulation.h"

using namespace shoal;
using namespace shoal::testing;

namespace {

using Elements = std::vector<int32_t>;
constexpr size_t element = sizeof(int32_t);

// The schedules of all ranks, and after them those of an aggregator for each slice.
std::vector<Schedule> schedules_of(const Hierarchy& hierarchy, size_t bytes, size_t chunk) {
  std::vector<Schedule> schedules;
  for (int rank = 0; rank < hierarchy.ranks(); ++rank) {
    Schedule& own = schedules.emplace_back();
    add_in_network_all_reduce(own, hierarchy, rank, bytes, element, chunk);
    for (Step& step : own.steps) {
      if (step.peer == hierarchy.ranks()) step.peer += hierarchy.index_of(rank);
    }
  }
  for (int slice = 0; slice < hierarchy.smallest(); ++slice) {
    const std::vector<int> ranks = hierarchy.across(slice);
    Schedule& aggregator = schedules.emplace_back();
    add_aggregation(aggregator, hierarchy.hosts(), aggregated_bytes(hierarchy, ranks.front(), bytes, element), element,
                    chunk, 64);
    for (Step& step : aggregator.steps) {
      if (step.peer >= 0) step.peer = ranks[static_cast<size_t>(step.peer)];
    }
  }
  return schedules;
}

Elements elements_of(int rank, size_t count) {
  Elements elements(count);
  std::iota(elements.begin(), elements.end(), 1000 * rank);
  return elements;
}

// Plays all of them, checks the results, and returns the length of the critical path.
int check(const std::vector<int>& hosts, size_t count, size_t chunk, size_t capacity, unsigned seed) {
  const Hierarchy hierarchy(hosts);
  Elements sum(count);
  std::vector<Elements> outputs;
  for (int rank = 0; rank < hierarchy.ranks(); ++rank) {
    outputs.push_back(elements_of(rank, count));
    for (size_t at = 0; at < count; ++at) sum[at] += outputs.back()[at];
  }
  // An aggregator has room for its windows only.
  const size_t room = aggregation_windows * std::min(std::max(chunk, 64UL), element * count + 64);
  for (int slice = 0; slice < hierarchy.smallest(); ++slice) outputs.emplace_back(room / element + 1);
  std::vector<Memory> memories;
  for (Elements& each : outputs) {
    memories.push_back({nullptr, 0, reinterpret_cast<std::byte*>(each.data()), each.size() * element});
  }
  Simulation simulation(schedules_of(hierarchy, element * count, chunk), memories, Dtype::int32, capacity, seed);
  std::string found;
  try {
    simulation.run();
    for (int rank = 0; rank < hierarchy.ranks(); ++rank) {
      if (outputs[static_cast<size_t>(rank)] != sum) found = "a wrong sum";
    }
  } catch (const Failure& failure) {
    found = failure.what();
  }
  if (!found.empty()) found += ", " + std::to_string(count) + " elements, chunks of " + std::to_string(chunk);
  CHECK_EQUAL(found, "");
  return simulation.critical_messages();
}

const std::vector<std::vector<int>> groups{
    {0, 1}, {0, 1, 2}, {0, 1, 2, 3, 4}, {0, 0, 1, 1}, {0, 1, 0, 1}, {7, 7, 3, 3, 5, 5}, {0, 0, 1}, {0, 1, 1, 1, 2, 2},
};

void every_order_of_events_gives_the_sum_on_every_rank() {
  unsigned seed = 0;
  for (const auto& hosts : groups) {
    for (const size_t count : {0, 1, 5, 64, 700}) {
      for (const size_t chunk : {16, 100, 1 << 20}) {
        for (const size_t capacity : {7, 64, 1 << 20}) check(hosts, count, chunk, capacity, ++seed);
      }
    }
  }
}

void a_message_up_and_a_message_down_follow_one_another() {
  CHECK_EQUAL(check({0, 1, 2, 3}, 64, 1 << 20, 1 << 20, 1), 2);
  // Within hosts of two ranks one more before, and one after.
  CHECK_EQUAL(check({0, 0, 1, 1}, 64, 1 << 20, 1 << 20, 1), 4);
}

void each_byte_goes_to_the_aggregator_once_and_comes_back_once() {
  constexpr size_t bytes = 64 * 1024;
  for (const auto& hosts : groups) {
    const Hierarchy hierarchy(hosts);
    for (int host = 0; host < hierarchy.hosts(); ++host) {
      size_t up = 0, down = 0;
      for (const int rank : hierarchy.ranks_on(host)) {
        Schedule schedule;
        add_in_network_all_reduce(schedule, hierarchy, rank, bytes, element, 4096);
        for (const Step& step : schedule.steps) {
          if (step.peer == hierarchy.ranks()) (step.kind == Step::Kind::send ? up : down) += step.region.bytes;
        }
        CHECK_EQUAL(schedule.scratch_bytes, 0);
      }
      CHECK_EQUAL(up, bytes);
      CHECK_EQUAL(down, bytes);
    }
  }
}

void an_aggregator_needs_the_same_memory_for_every_size() {
  constexpr size_t chunk = 4096;
  for (const size_t bytes : {100 * chunk, 200 * chunk}) {
    Schedule schedule;
    add_aggregation(schedule, 3, bytes, element, chunk, 64);
    CHECK_EQUAL(schedule.scratch_bytes, 64 + aggregation_windows * 3 * chunk);
    for (const Step& step : schedule.steps) {
      CHECK(step.region.space == Space::scratch || step.region.offset + step.region.bytes <= aggregation_windows * chunk);
    }
  }
}

}  // namespace

int main() {
  every_order_of_events_gives_the_sum_on_every_rank();
  a_message_up_and_a_message_down_follow_one_another();
  each_byte_goes_to_the_aggregator_once_and_comes_back_once();
  an_aggregator_needs_the_same_memory_for_every_size();
  return report();
}
