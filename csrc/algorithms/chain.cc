#include "algorithms/chain.h"

#include "algorithms/rooted_tree.h"

// root -> root + 1 -> root + 2 -> ... (modulo n); a reduction runs the other way. Each rank passes on chunk c
// while chunk c + 1 arrives, so with C chunks it takes n - 2 + C chunk times: n - 1 messages until the first
// chunk is at the end, and S bytes over each link.
//
//   time       0     1     2     3     4
//   0 -> 1    c0    c1    c2
//   1 -> 2          c0    c1    c2
//   2 -> 3                c0    c1    c2

namespace shoal {

namespace {

TreePlace chain(int rank, int size, int root) {
  TreePlace place;
  if (rank != root) place.parent = (rank + size - 1) % size;
  if ((rank + 1) % size != root) place.children.push_back((rank + 1) % size);
  return place;
}

}  // namespace

Schedule chain_broadcast(int rank, int size, int root, size_t bytes, size_t element, size_t chunk) {
  return broadcast_along(chain(rank, size, root), bytes, element, chunk);
}

Schedule chain_reduce(int rank, int size, int root, size_t bytes, size_t element, size_t chunk) {
  return reduce_along(chain(rank, size, root), bytes, element, chunk);
}

}  // namespace shoal
