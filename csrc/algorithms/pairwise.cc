#include "algorithms/pairwise.h"

// In step s = 1 .. n - 1 rank r sends to rank r + s and receives from rank r - s (modulo n), so that in a step no two
// ranks send to the same one. The steps are not synchronised: they are only the order in which links are served. n - 1
// messages each way per rank; in a gather or scatter n - 1 at the root, one elsewhere.

namespace shoal {

Schedule pairwise_all_to_all(int rank, const std::vector<Extent>& sends,
                             const std::vector<Extent>& receives) {
  Schedule schedule;
  const int size = static_cast<int>(sends.size());
  const auto leaving = [&](int peer) {
    const Extent& extent = sends[static_cast<size_t>(peer)];
    return Region{Space::input, extent.offset, extent.bytes};
  };
  const auto coming = [&](int peer) {
    const Extent& extent = receives[static_cast<size_t>(peer)];
    return Region{Space::output, extent.offset, extent.bytes};
  };
  schedule.copy(coming(rank), leaving(rank).place(), no_step);
  for (int shift = 1; shift < size; ++shift) {
    const int to = (rank + shift) % size;
    const int from = (rank + size - shift) % size;
    schedule.send(to, leaving(to), no_step);
    schedule.receive(from, coming(from), no_step);
  }
  return schedule;
}

Schedule direct_gather(int rank, int size, int root, size_t bytes) {
  const auto count = static_cast<size_t>(size);
  std::vector<Extent> sends(count), receives(count);
  sends[static_cast<size_t>(root)] = {0, bytes};
  if (rank == root) {
    for (size_t peer = 0; peer < count; ++peer) receives[peer] = {peer * bytes, bytes};
  }
  return pairwise_all_to_all(rank, sends, receives);
}

Schedule direct_scatter(int rank, int size, int root, size_t bytes) {
  const auto count = static_cast<size_t>(size);
  std::vector<Extent> sends(count), receives(count);
  if (rank == root) {
    for (size_t peer = 0; peer < count; ++peer) sends[peer] = {peer * bytes, bytes};
  }
  receives[static_cast<size_t>(root)] = {0, bytes};
  return pairwise_all_to_all(rank, sends, receives);
}

}  // namespace shoal
