#include "algorithms/trees.h"

#include <algorithm>

#include "algorithms/slice.h"

namespace shoal {

std::vector<int> add_reduction(Schedule& schedule, const TreePlace& tree, Region own, Sums sums,
                               size_t chunk) {
  const int chunks = chunk_count(own.bytes, chunk);
  std::vector<int> made(static_cast<size_t>(chunks), no_step);
  std::vector<int> sent(static_cast<size_t>(chunks), no_step);
  for (int index = 0; index < chunks; ++index) {
    const auto i = static_cast<size_t>(index);
    Region sum = chunk_of(own, chunk, index);
    if (!tree.children.empty()) {
      // A window is used again when its sum has gone to the parent.
      made[i] = index >= sums.windows ? sent[i - static_cast<size_t>(sums.windows)] : no_step;
      const size_t window = static_cast<size_t>(index % sums.windows) * chunk;
      Place addend = sum.place();
      sum = {sums.place.space, sums.place.offset + window, sum.bytes};
      for (const int child : tree.children) {
        made[i] = schedule.receive_reduce(child, sum, addend, made[i]);
        addend = sum.place();
      }
    }
    if (tree.parent >= 0) sent[i] = schedule.send(tree.parent, sum, made[i]);
  }
  return made;
}

void add_broadcast(Schedule& schedule, const TreePlace& tree, Region whole, const std::vector<int>& ready,
                   size_t chunk) {
  for (int index = 0; index < chunk_count(whole.bytes, chunk); ++index) {
    const Region piece = chunk_of(whole, chunk, index);
    int here = ready.empty() ? no_step : ready[static_cast<size_t>(index)];
    // The result was made from data that this rank has sent, so nothing here still needs the region.
    if (tree.parent >= 0) here = schedule.receive(tree.parent, piece, no_step);
    for (const int child : tree.children) schedule.send(child, piece, here);
  }
}

namespace {

Schedule reduce_along(const TreePlace& tree, size_t bytes, size_t element, size_t chunk) {
  Schedule schedule;
  const Region own{Space::input, 0, bytes};
  const bool is_root = tree.parent < 0;
  if (is_root && tree.children.empty()) {
    schedule.copy({Space::output, 0, bytes}, own.place(), no_step);
    return schedule;
  }
  constexpr int windows_in_scratch = 4;  // one fills while another empties; two more for uneven speeds
  chunk = chunk_bytes(element, chunk);
  const int chunks = chunk_count(bytes, chunk);
  if (is_root) {
    add_reduction(schedule, tree, own, {{Space::output, 0}, std::max(chunks, 1)}, chunk);
    return schedule;
  }
  const int windows = std::min(chunks, windows_in_scratch);
  if (!tree.children.empty()) schedule.scratch_bytes = std::min(bytes, static_cast<size_t>(windows) * chunk);
  add_reduction(schedule, tree, own, {{Space::scratch, 0}, windows}, chunk);
  return schedule;
}

Schedule broadcast_along(const TreePlace& tree, size_t bytes, size_t element, size_t chunk) {
  Schedule schedule;
  add_broadcast(schedule, tree, {Space::output, 0, bytes}, {}, chunk_bytes(element, chunk));
  return schedule;
}

// root -> root + 1 -> root + 2 -> ... (modulo n); a reduction runs the other way. Each rank passes on chunk c
// while chunk c + 1 arrives, so with C chunks it takes n - 2 + C chunk times: n - 1 messages until the first
// chunk is at the end, and S bytes over each link.
//
//   time       0     1     2     3     4
//   0 -> 1    c0    c1    c2
//   1 -> 2          c0    c1    c2
//   2 -> 3                c0    c1    c2
TreePlace chain(int rank, int size, int root) {
  TreePlace place;
  if (rank != root) place.parent = (rank + size - 1) % size;
  if ((rank + 1) % size != root) place.children.push_back((rank + 1) % size);
  return place;
}

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
// Every rank but the root gets one message (broadcast) or sends one (reduce) of all S bytes; the root has ceil(log2 n)
// of them, one for each of as many steps. With several chunks the steps overlap, but the root's link still carries
// ceil(log2 n) S bytes: a chain is better for large buffers.
//
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

Schedule chain_broadcast(int rank, int size, int root, size_t bytes, size_t element, size_t chunk) {
  return broadcast_along(chain(rank, size, root), bytes, element, chunk);
}

Schedule chain_reduce(int rank, int size, int root, size_t bytes, size_t element, size_t chunk) {
  return reduce_along(chain(rank, size, root), bytes, element, chunk);
}

Schedule tree_broadcast(int rank, int size, int root, size_t bytes, size_t element, size_t chunk) {
  return broadcast_along(binomial_tree(rank, size, root), bytes, element, chunk);
}

Schedule tree_reduce(int rank, int size, int root, size_t bytes, size_t element, size_t chunk) {
  TreePlace place = binomial_tree(rank, size, root);
  std::reverse(place.children.begin(), place.children.end());
  return reduce_along(place, bytes, element, chunk);
}

}  // namespace shoal
