// Collectives in two levels, for hosts with several ranks: data crosses the network once per host.
#pragma once

#include <functional>
#include <vector>

#include "algorithms/host.h"
#include "algorithms/operation.h"
#include "algorithms/schedule.h"

namespace shoal {

// Which ranks of a group are on which host.
class Hierarchy {
 public:
  // `hosts`: for every rank, which host it is on; equal numbers, same host.
  explicit Hierarchy(const std::vector<int>& hosts);

  int ranks() const { return static_cast<int>(host_of_.size()); }
  int hosts() const { return static_cast<int>(ranks_.size()); }
  const std::vector<int>& ranks_on(int host) const { return ranks_[static_cast<size_t>(host)]; }
  int host_of(int rank) const { return host_of_[static_cast<size_t>(rank)]; }
  int index_of(int rank) const { return index_of_[static_cast<size_t>(rank)]; }  // among its host's

  // Ranks of the smallest host, and whether all hosts have the same number.
  int smallest() const { return smallest_; }
  bool is_even() const;

  // The ranks with that index, by host. `index` is below `smallest`.
  std::vector<int> across(int index) const;

 private:
  std::vector<std::vector<int>> ranks_;  // by host, hosts in the order of their first ranks
  std::vector<int> host_of_, index_of_;  // by rank
  int smallest_;
};

// In place in the output. `chunk`: the most bytes of one step.
Schedule hierarchical_all_reduce(const Hierarchy& hierarchy, int rank, size_t bytes, size_t element, size_t chunk);

// `bytes` per rank; the output holds `bytes` for every rank. The hierarchy is even.
Schedule hierarchical_all_gather(const Hierarchy& hierarchy, int rank, size_t bytes, size_t element, size_t chunk);

// The input holds `bytes` for every rank, the output this rank's sum. The hierarchy is even. Scratch: some ten chunks.
Schedule hierarchical_reduce_scatter(const Hierarchy& hierarchy, int rank, size_t bytes, size_t element, size_t chunk);

// All-reduce one level after the other: for small buffers, and for sums that travel in 16 bits; these are rounded after
// each level. `slices` is the number of ranks of each host that have a slice: the size of the smallest host. `across`
// reduces a slice of the sum over this host, in place, over all hosts.
void run_hierarchical_all_reduce(const Operation& operation, Host& host, int slices,
                                 const std::function<void(std::byte* slice, size_t bytes)>& across);

}  // namespace shoal
