// The two-level schedules: right for any order of events and any ranks per host, with the bytes of their formulas.
#include "algorithms/hierarchical.h"

#include <functional>
#include <numeric>

#include "tests/check.h"
#include "tests/count.h"
#include "tests/simulation.h"

using namespace shoal;
using namespace shoal::testing;

namespace {

using Elements = std::vector<int32_t>;

Memory memory_of(const Elements& input, Elements& output) {
  return {reinterpret_cast<const std::byte*>(input.data()), input.size() * sizeof(int32_t),
          reinterpret_cast<std::byte*>(output.data()), output.size() * sizeof(int32_t)};
}

// Rank `rank`'s elements.
Elements elements_of(size_t rank, size_t count) {
  Elements elements(count);
  std::iota(elements.begin(), elements.end(), static_cast<int32_t>(1000 * rank));
  return elements;
}

std::string run(std::vector<Schedule> schedules, std::vector<Elements>& inputs, std::vector<Elements>& outputs,
                size_t capacity, unsigned seed) {
  std::vector<Memory> memories;
  for (size_t rank = 0; rank < inputs.size(); ++rank) memories.push_back(memory_of(inputs[rank], outputs[rank]));
  try {
    Simulation(std::move(schedules), memories, Dtype::int32, capacity, seed).run();
  } catch (const Failure& failure) {
    return failure.what();
  }
  return "";
}

const std::vector<std::vector<int>> groups{
    {0}, {0, 1}, {0, 0}, {0, 0, 1, 1}, {0, 1, 0, 1}, {7, 7, 3, 3, 5, 5}, {0, 0, 0, 1, 1, 1}, {0, 0, 1}, {0, 1, 1, 1, 2, 2},
};

void all_reduce_is_the_sum_on_every_rank() {
  unsigned seed = 0;
  for (const auto& hosts : groups) {
    const Hierarchy hierarchy(hosts);
    for (const size_t count : {0, 1, 5, 64, 700}) {
      for (const size_t chunk : {16, 100, 1 << 20}) {
        for (const size_t capacity : {7, 64, 1 << 20}) {
          std::vector<Schedule> schedules;
          std::vector<Elements> inputs;
          Elements sum(count);
          for (size_t rank = 0; rank < hosts.size(); ++rank) {
            schedules.push_back(
                hierarchical_all_reduce(hierarchy, static_cast<int>(rank), 4 * count, 4, chunk));
            inputs.push_back(elements_of(rank, count));
            for (size_t at = 0; at < count; ++at) sum[at] += inputs[rank][at];
          }
          std::vector<Elements> outputs = inputs;
          CHECK_EQUAL(run(std::move(schedules), inputs, outputs, capacity, ++seed), "");
          for (const Elements& output : outputs) CHECK(output == sum);
        }
      }
    }
  }
}

void all_gather_gives_everybody_everything() {
  unsigned seed = 0;
  for (const auto& hosts : groups) {
    const Hierarchy hierarchy(hosts);
    if (!hierarchy.is_even()) continue;
    for (const size_t count : {0, 1, 5, 200}) {
      for (const size_t chunk : {16, 100, 1 << 20}) {
        for (const size_t capacity : {7, 1 << 20}) {
          std::vector<Schedule> schedules;
          std::vector<Elements> inputs, outputs(hosts.size(), Elements(count * hosts.size()));
          Elements all;
          for (size_t rank = 0; rank < hosts.size(); ++rank) {
            schedules.push_back(
                hierarchical_all_gather(hierarchy, static_cast<int>(rank), 4 * count, 4, chunk));
            inputs.push_back(elements_of(rank, count));
            all.insert(all.end(), inputs[rank].begin(), inputs[rank].end());
          }
          CHECK_EQUAL(run(std::move(schedules), inputs, outputs, capacity, ++seed), "");
          for (const Elements& output : outputs) CHECK(output == all);
        }
      }
    }
  }
}

void reduce_scatter_gives_everybody_the_sum_of_his_part() {
  unsigned seed = 0;
  for (const auto& hosts : groups) {
    const Hierarchy hierarchy(hosts);
    if (!hierarchy.is_even()) continue;
    for (const size_t count : {0, 1, 5, 200}) {
      for (const size_t chunk : {16, 100, 1 << 20}) {
        for (const size_t capacity : {7, 64, 1 << 20}) {
          std::vector<Schedule> schedules;
          std::vector<Elements> inputs, outputs(hosts.size(), Elements(count));
          Elements sum(count * hosts.size());
          for (size_t rank = 0; rank < hosts.size(); ++rank) {
            schedules.push_back(
                hierarchical_reduce_scatter(hierarchy, static_cast<int>(rank), 4 * count, 4, chunk));
            inputs.push_back(elements_of(rank, count * hosts.size()));
            for (size_t at = 0; at < sum.size(); ++at) sum[at] += inputs[rank][at];
          }
          const std::vector<Elements> given = inputs;
          CHECK_EQUAL(run(std::move(schedules), inputs, outputs, capacity, ++seed), "");
          CHECK(inputs == given);
          for (size_t rank = 0; rank < hosts.size(); ++rank) {
            const auto part = sum.begin() + static_cast<std::ptrdiff_t>(rank * count);
            CHECK(std::equal(outputs[rank].begin(), outputs[rank].end(), part));
          }
        }
      }
    }
  }
}

void scratch_of_a_reduce_scatter_does_not_grow_with_the_buffer() {
  const Hierarchy hierarchy({0, 0, 0, 1, 1, 1});
  for (const size_t bytes : {size_t{1} << 16, size_t{1} << 20}) {
    CHECK_EQUAL(hierarchical_reduce_scatter(hierarchy, 4, bytes, 4, 1024).scratch_bytes, 10 * 1024);
  }
}

// What the ranks of host 0 send to other hosts.
size_t bytes_across(const Hierarchy& hierarchy, const std::function<Schedule(int rank)>& schedule_of) {
  size_t bytes = 0;
  for (const int rank : hierarchy.ranks_on(0)) {
    for (const auto& [peer, traffic] : count(schedule_of(rank)).sent) {
      if (hierarchy.host_of(peer) != 0) bytes += traffic.bytes;
    }
  }
  return bytes;
}

void bytes_across_are_as_few_as_can_be() {
  for (const int hosts_count : {2, 3, 4}) {
    for (const int ranks_each : {1, 2, 3}) {
      std::vector<int> hosts;
      for (int rank = 0; rank < hosts_count * ranks_each; ++rank) hosts.push_back(rank / ranks_each);
      const Hierarchy hierarchy(hosts);
      const auto k = static_cast<size_t>(hosts_count), n = hosts.size();
      const size_t part = 64 * 12, whole = part * n;
      CHECK_EQUAL(bytes_across(hierarchy, [&](int rank) { return hierarchical_all_reduce(hierarchy, rank, whole, 4, 256); }),
                  2 * (k - 1) * whole / k);
      CHECK_EQUAL(bytes_across(hierarchy, [&](int rank) { return hierarchical_all_gather(hierarchy, rank, part, 4, 256); }),
                  (k - 1) * whole / k);
      CHECK_EQUAL(bytes_across(hierarchy, [&](int rank) { return hierarchical_reduce_scatter(hierarchy, rank, part, 4, 256); }),
                  (k - 1) * whole / k);
    }
  }
}

}  // namespace

int main() {
  all_reduce_is_the_sum_on_every_rank();
  all_gather_gives_everybody_everything();
  reduce_scatter_gives_everybody_the_sum_of_his_part();
  scratch_of_a_reduce_scatter_does_not_grow_with_the_buffer();
  bytes_across_are_as_few_as_can_be();
  return report();
}
