// Reductions and broadcasts along trees of ranks: chains, for large buffers, at the speed of one link for any number of
// ranks; binomial trees, in ceil(log2 n) steps, for small buffers or many ranks; and trees of any shape, such as the
// two of a double binary tree.
//
// A broadcast takes the data from the root's output to every rank's output, a reduction from every rank's input to the
// root's output, both in chunks. A reduction needs scratch on inner ranks, of four chunks at most.
#pragma once

#include <vector>

#include "algorithms/schedule.h"

namespace shoal {

// A rank's place in a tree of ranks.
struct TreePlace {
  int parent = -1;            // -1: the root
  std::vector<int> children;  // in the order in which they are served
};

// Where a rank keeps the sums of its subtree: chunk i at `place` plus (i modulo `windows`) chunks.
struct Sums {
  Place place;
  int windows;
};

// Adds a reduction towards the root: a rank folds each chunk of its `own` region with the chunks of its children, in
// their order, keeps the sum in `sums` (which may be `own` itself) and sends it to its parent. A leaf sends its own.
// Returns, per chunk, the step that makes the rank's sum.
std::vector<int> add_reduction(Schedule& schedule, const TreePlace& tree, Region own, Sums sums,
                               size_t chunk);

// Adds a broadcast from the root: a rank sends on each chunk of the region as it comes. `ready`: per chunk,
// the step that makes it at the root; empty if it is there from the start.
void add_broadcast(Schedule& schedule, const TreePlace& tree, Region whole, const std::vector<int>& ready,
                   size_t chunk);

Schedule chain_broadcast(int rank, int size, int root, size_t bytes, size_t element, size_t chunk);
Schedule chain_reduce(int rank, int size, int root, size_t bytes, size_t element, size_t chunk);

Schedule tree_broadcast(int rank, int size, int root, size_t bytes, size_t element, size_t chunk);
Schedule tree_reduce(int rank, int size, int root, size_t bytes, size_t element, size_t chunk);

}  // namespace shoal
