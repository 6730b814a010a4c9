#include "algorithms/double_tree.h"

#include "algorithms/slice.h"
#include "algorithms/trees.h"

// One half of the buffer is reduced to the root of one binary tree and broadcast from there, the other half
// along another tree. In a binary tree half of the ranks are leaves, which send little; the two trees are
// laid so that a rank is inner in at most one of them. So no rank sends or receives more than 2 S bytes.
//
// The first tree is in order over positions 1 .. n: leaves are the odd positions, and the root of any stretch of
// positions is the one with the most factors of two. Rank r stands at position r + 1. In the second tree every rank
// stands one position further, the last rank at position 1: odd turns to even, so an inner rank becomes a leaf. Six
// ranks, by position and then by rank:
//
//          4                    3                    2
//        /   \                /   \                /   \          .
//       2     6              1     5              0     4
//      / \   /              / \   /              / \   /
//     1   3 5              0   2 4              5   1 3
//
// Chunks follow one another up and down: 2 floor(log2 n) steps for the first, then as fast as the links carry
// them. A rank folds its own elements with its left child's, then its right child's.

namespace shoal {

namespace {

// The number in first .. last that has the most factors of two.
int root_of(int first, int last) {
  int root = last;
  while ((root & (root - 1)) >= first) root &= root - 1;
  return root;
}

struct Neighbours {
  int parent = 0, left = 0, right = 0;  // 0: none
};

Neighbours in_order_tree(int position, int size) {
  Neighbours found;
  int first = 1, last = size, root = root_of(first, last);
  while (root != position) {
    found.parent = root;
    if (position < root) {
      last = root - 1;
    } else {
      first = root + 1;
    }
    root = root_of(first, last);
  }
  if (first < position) found.left = root_of(first, position - 1);
  if (position < last) found.right = root_of(position + 1, last);
  return found;
}

// The tree in which rank r stands at position r + 1 + shift, modulo n.
TreePlace shifted_tree(int rank, int size, int shift) {
  const auto found = in_order_tree((rank + shift) % size + 1, size);
  const auto rank_at = [&](int position) { return (position - 1 + size - shift) % size; };
  TreePlace place;
  if (found.parent != 0) place.parent = rank_at(found.parent);
  if (found.left != 0) place.children.push_back(rank_at(found.left));
  if (found.right != 0) place.children.push_back(rank_at(found.right));
  return place;
}

}  // namespace

Schedule double_tree_all_reduce(int rank, int size, size_t bytes, size_t element, size_t chunk) {
  Schedule schedule;
  if (size == 1) return schedule;
  const auto halves = slice_boundaries(bytes, element, 2);
  chunk = chunk_bytes(element, chunk);
  std::vector<int> made[2];
  for (const int half : {0, 1}) {
    const Region own = slice(Space::output, halves, half);
    made[half] = add_reduction(schedule, shifted_tree(rank, size, half), own,
                               {own.place(), chunk_count(own.bytes, chunk)}, chunk);
  }
  for (const int half : {0, 1}) {
    add_broadcast(schedule, shifted_tree(rank, size, half), slice(Space::output, halves, half), made[half],
                  chunk);
  }
  return schedule;
}

}  // namespace shoal
