#include "algorithms/tree.h"

#include <algorithm>

#include "algorithms/rooted_tree.h"

// Ranks are counted from the root. The parent of a rank is that rank with its lowest bit cleared; its
// children are the ranks with one more, lower bit. Eight ranks:
//
//         0
//      /  |  \            .
//     4   2   1           a broadcast goes to the deepest subtree first: 4, 2, 1,
//    / \  |               a reduction folds them in the order in which they finish: 1, 2, 4
//   6   5 3
//   |
//   7
//
// Every rank but the root gets one message (broadcast) or sends one (reduce) of all S bytes; the root has
// ceil(log2 n) of them, one for each of as many steps. With several chunks the steps overlap, but the root's
// link still carries ceil(log2 n) S bytes: a chain is better for what is large.

namespace shoal {

namespace {

// Children with the deepest subtree first.
TreePlace binomial_tree(int rank, int size, int root) {
  const int position = (rank + size - root) % size;
  const auto rank_at = [&](int other) { return (other + root) % size; };
  TreePlace place;
  int bit = 1;
  for (; bit < size && (position & bit) == 0; bit *= 2) {
    if (position + bit < size) place.children.push_back(rank_at(position + bit));
  }
  std::reverse(place.children.begin(), place.children.end());
  if (position != 0) place.parent = rank_at(position - bit);
  return place;
}

}  // namespace

Schedule tree_broadcast(int rank, int size, int root, size_t bytes, size_t element, size_t chunk) {
  return broadcast_along(binomial_tree(rank, size, root), bytes, element, chunk);
}

Schedule tree_reduce(int rank, int size, int root, size_t bytes, size_t element, size_t chunk) {
  TreePlace place = binomial_tree(rank, size, root);
  std::reverse(place.children.begin(), place.children.end());
  return reduce_along(place, bytes, element, chunk);
}

}  // namespace shoal
