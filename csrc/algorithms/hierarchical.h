// All-reduce in two levels: ranks of a host fold a slice each, every slice is all-reduced among the ranks that have
// it on the different hosts, and the ranks of a host take each other's slices.
//
//   host 0   rank 0  [A.]--fold-->[A]       [A']--.            What crosses the network is S / g per rank, and
//            rank 1  [.B]--fold-->[B]--net-->[B']--share-->    2 (k - 1)/k S per host, as little as can be;
//   host 1   rank 2  [A.]--fold-->[A]--net-->[A']              k hosts of g ranks. The steps inside the hosts go
//            rank 3  [.B]--fold-->[B]       [B']--'            through shared memory.
//
// A host with more ranks than another has ranks without a slice. 16-bit floats are rounded after each level.
#pragma once

#include <functional>

#include "algorithms/host.h"
#include "algorithms/operation.h"

namespace shoal {

// `slices` is how many ranks of every host have one: the size of the smallest host. `across` reduces a slice of the
// sum over this host, in place, over all hosts.
void run_hierarchical_all_reduce(const Operation& operation, Host& host, int slices,
                                 const std::function<void(std::byte* slice, size_t bytes)>& across);

}  // namespace shoal
