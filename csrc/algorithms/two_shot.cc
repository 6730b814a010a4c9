#include "algorithms/two_shot.h"

#include "algorithms/rank_order.h"
#include "algorithms/slice.h"

// The buffer is cut into one slice per rank. First shot (reduce-scatter): every rank sends slice i to rank i, which
// folds all of them in the order of ranks. Second shot (all-gather): rank i sends the result to all ranks.
//
//            rank 0     rank 1     rank 2
//            a b c      a b c      a b c      b -> rank 1, c -> rank 2, ...
//   fold     A b c      a B c      a b C      A -> ranks 1 and 2, ...
//            A B C      A B C      A B C
//
// Per rank: n - 1 messages of S / n bytes each way and shot, as many as in a ring, but all messages of a shot at once:
// two steps. The price is a link to every rank. 16-bit floats travel as such and are still rounded once.
//
// Each rank begins with the rank after it, so that not all ranks send to the same one.

namespace shoal {

namespace {

// Adds the first shot: slice i of the source, here, to rank i, and the fold of one's own into the result.
std::vector<int> add_direct_reduce_scatter(Schedule& schedule, int rank, int size, Space source,
                                           const std::vector<size_t>& boundaries, Place result,
                                           size_t chunk) {
  for (int shift = 1; shift < size; ++shift) {
    const int peer = (rank + shift) % size;
    schedule.send(peer, slice(source, boundaries, peer), no_step);
  }
  return add_rank_order_fold(schedule, rank, size, slice(source, boundaries, rank), result, {}, chunk);
}

}  // namespace

Schedule two_shot_all_reduce(int rank, int size, size_t bytes, size_t element, size_t chunk) {
  Schedule schedule;
  if (size == 1) return schedule;
  const auto boundaries = slice_boundaries(bytes, element, size);
  const Region own = slice(Space::output, boundaries, rank);
  chunk = chunk_bytes(element, chunk);
  const auto folded =
      add_direct_reduce_scatter(schedule, rank, size, Space::output, boundaries, own.place(), chunk);
  for (int index = 0; index < chunk_count(own.bytes, chunk); ++index) {
    for (int shift = 1; shift < size; ++shift) {
      schedule.send((rank + shift) % size, chunk_of(own, chunk, index), folded[static_cast<size_t>(index)]);
    }
  }
  // A rank folds the slices that it received before it sends the result, so the region is free when the result arrives.
  for (int peer = 0; peer < size; ++peer) {
    if (peer != rank) schedule.receive(peer, slice(Space::output, boundaries, peer), no_step);
  }
  return schedule;
}

Schedule direct_all_gather(int rank, int size, size_t bytes) {
  Schedule schedule;
  const auto boundaries = part_boundaries(bytes, size);
  schedule.copy(slice(Space::output, boundaries, rank), {Space::input, 0}, no_step);
  for (int shift = 1; shift < size; ++shift) {
    const int to = (rank + shift) % size;
    const int from = (rank + size - shift) % size;
    schedule.send(to, {Space::input, 0, bytes}, no_step);
    schedule.receive(from, slice(Space::output, boundaries, from), no_step);
  }
  return schedule;
}

Schedule direct_reduce_scatter(int rank, int size, size_t bytes, size_t element, size_t chunk) {
  Schedule schedule;
  if (size == 1) {
    schedule.copy({Space::output, 0, bytes}, {Space::input, 0}, no_step);
    return schedule;
  }
  add_direct_reduce_scatter(schedule, rank, size, Space::input, part_boundaries(bytes, size),
                            {Space::output, 0}, chunk_bytes(element, chunk));
  return schedule;
}

}  // namespace shoal
