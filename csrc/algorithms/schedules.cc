#include "algorithms/schedules.h"

#include "algorithms/double_tree.h"
#include "algorithms/halving_doubling.h"
#include "algorithms/one_shot.h"
#include "algorithms/pairwise.h"
#include "algorithms/ring.h"
#include "algorithms/trees.h"
#include "algorithms/two_shot.h"

namespace shoal {

namespace {

std::vector<Extent> extents(const std::vector<size_t>& bytes) {
  std::vector<Extent> all;
  size_t offset = 0;
  for (const size_t part : bytes) {
    all.push_back({offset, part});
    offset += part;
  }
  return all;
}

}  // namespace

Schedule schedule_of(const Operation& op, int rank, const Hierarchy& hierarchy) {
  const int size = hierarchy.ranks();
  const size_t element = size_of(op.dtype);
  switch (op.collective) {
    case Collective::barrier:
      return recursive_doubling_all_gather(rank, size, 1);
    case Collective::all_reduce:
      switch (op.algorithm) {
        case Algorithm::one_shot:
          return one_shot_all_reduce(rank, size, op.bytes, element, chunk_limit);
        case Algorithm::direct:
          return two_shot_all_reduce(rank, size, op.bytes, element, chunk_limit);
        case Algorithm::ring:
          return ring_all_reduce(rank, size, op.bytes, element, chunk_limit);
        case Algorithm::halving_doubling:
          return halving_doubling_all_reduce(rank, size, op.bytes, element);
        case Algorithm::double_tree:
          return double_tree_all_reduce(rank, size, op.bytes, element, chunk_limit);
        case Algorithm::hierarchical:
          return hierarchical_all_reduce(hierarchy, rank, op.bytes, element, chunk_limit);
        default:
          throw Failure(Code::invalid, -1, "all-reduce over links has no such algorithm");
      }
    case Collective::all_gather:
      if (op.algorithm == Algorithm::hierarchical && hierarchy.is_even()) {
        return hierarchical_all_gather(hierarchy, rank, op.bytes, element, chunk_limit);
      }
      if (op.algorithm == Algorithm::ring) return ring_all_gather(rank, size, op.bytes, element, chunk_limit);
      if (op.algorithm == Algorithm::halving_doubling) {
        return recursive_doubling_all_gather(rank, size, op.bytes);
      }
      return direct_all_gather(rank, size, op.bytes);
    case Collective::reduce_scatter:
      if (op.algorithm == Algorithm::hierarchical && hierarchy.is_even()) {
        return hierarchical_reduce_scatter(hierarchy, rank, op.bytes, element, chunk_limit);
      }
      if (op.algorithm == Algorithm::ring) return ring_reduce_scatter(rank, size, op.bytes, element, chunk_limit);
      if (op.algorithm == Algorithm::halving_doubling) {
        return recursive_halving_reduce_scatter(rank, size, op.bytes);
      }
      return direct_reduce_scatter(rank, size, op.bytes, element, chunk_limit);
    case Collective::broadcast:
      if (op.algorithm == Algorithm::chain) {
        return chain_broadcast(rank, size, op.root, op.bytes, element, chunk_limit);
      }
      return tree_broadcast(rank, size, op.root, op.bytes, element, chunk_limit);
    case Collective::reduce:
      if (op.algorithm == Algorithm::chain) {
        return chain_reduce(rank, size, op.root, op.bytes, element, chunk_limit);
      }
      return tree_reduce(rank, size, op.root, op.bytes, element, chunk_limit);
    case Collective::gather:
      return direct_gather(rank, size, op.root, op.bytes);
    case Collective::scatter:
      return direct_scatter(rank, size, op.root, op.bytes);
    case Collective::all_to_all:
      return pairwise_all_to_all(rank, extents(op.send_bytes), extents(op.receive_bytes));
  }
  throw Failure(Code::invalid, -1, "the collective has no such algorithm");
}

bool passes_on_sums(const Operation& op) {
  switch (op.collective) {
    case Collective::all_reduce:
    case Collective::reduce_scatter:
      return op.algorithm != Algorithm::one_shot && op.algorithm != Algorithm::direct;
    case Collective::reduce:
      return true;
    default:
      return false;
  }
}

}  // namespace shoal
