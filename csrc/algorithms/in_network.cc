#include "algorithms/in_network.h"

#include <algorithm>

#include "algorithms/slice.h"

// The buffer is cut into one slice for each rank of a host (of the smallest host, if they differ). The rank with index
// i on its host folds slice i of its host's ranks, sends it to the aggregator in chunks, gets the sum of all hosts, and
// shares it with the ranks of its host:
//
//   host 0 ---\                     /--- host 0
//   host 1 ---- aggregator: sum --------- host 1
//   host 2 ---/                     \--- host 2
//
// Each byte of the buffer crosses a host's link once up and once down, whatever the number of hosts. A ring among k
// hosts takes 2(k - 1)/k of them each way. A chunk comes down while later ones go up, so both directions are busy.
//
// The aggregator folds a chunk when it has come from all hosts, in the order of hosts: the result does not depend on
// who came first, and it is computed once, so all ranks get the same bits. Chunks use a few windows in turn: a window
// is free for the next chunk's data when it is folded, and for its sum when all hosts have taken the one before. So
// the aggregator needs the same memory for every size of the buffer.

namespace shoal {

namespace {

Region own_slice(const Hierarchy& hierarchy, int rank, const std::vector<size_t>& boundaries) {
  const int own = hierarchy.index_of(rank);
  return own < hierarchy.smallest() ? slice(Space::output, boundaries, own) : Region{};
}

}  // namespace

size_t aggregated_bytes(const Hierarchy& hierarchy, int rank, size_t bytes, size_t element) {
  return own_slice(hierarchy, rank, slice_boundaries(bytes, element, hierarchy.smallest())).bytes;
}

void add_in_network_all_reduce(Schedule& schedule, const Hierarchy& hierarchy, int rank, size_t bytes, size_t element,
                               size_t chunk) {
  const int aggregator = hierarchy.ranks(), own = hierarchy.index_of(rank);
  const std::vector<int>& here = hierarchy.ranks_on(hierarchy.host_of(rank));
  const int count_here = static_cast<int>(here.size());
  const auto boundaries = slice_boundaries(bytes, element, hierarchy.smallest());
  chunk = chunk_bytes(element, chunk);
  const auto peer_at = [&](int shift) { return here[static_cast<size_t>((own + shift) % count_here)]; };
  const auto for_each_chunk = [&](const Region& region, const auto& add) {
    for (int index = 0; index < chunk_count(region.bytes, chunk); ++index) add(index, chunk_of(region, chunk, index));
  };
  const auto for_each_other_slice = [&](const auto& add) {
    for (int index = 0; index < hierarchy.smallest(); ++index) {
      if (index == own) continue;
      for_each_chunk(slice(Space::output, boundaries, index),
                     [&](int, const Region& piece) { add(here[static_cast<size_t>(index)], piece); });
    }
  };

  for_each_other_slice([&](int peer, const Region& piece) { schedule.send(peer, piece, no_step); });
  const Region region = own_slice(hierarchy, rank, boundaries);
  std::vector<int> sent;
  for_each_chunk(region, [&](int, const Region& piece) {
    int folded = no_step;
    for (int shift = 1; shift < count_here; ++shift) {
      folded = schedule.receive_reduce(peer_at(shift), piece, piece.place(), folded);
    }
    sent.push_back(schedule.send(aggregator, piece, folded));
  });
  for_each_chunk(region, [&](int index, const Region& piece) {
    const int received = schedule.receive(aggregator, piece, sent[static_cast<size_t>(index)]);
    for (int shift = 1; shift < count_here; ++shift) schedule.send(peer_at(shift), piece, received);
  });
  // A rank folds a piece before it shares the result, so the piece has left when its result comes.
  for_each_other_slice([&](int peer, const Region& piece) { schedule.receive(peer, piece, no_step); });
}

void add_aggregation(Schedule& schedule, int hosts, size_t bytes, size_t element, size_t chunk, size_t scratch_offset) {
  chunk = chunk_bytes(element, chunk);
  const Region whole{Space::output, 0, bytes};
  const size_t stride = std::min(chunk, bytes), window_bytes = static_cast<size_t>(hosts) * stride;
  const int chunks = chunk_count(bytes, chunk);
  schedule.scratch_bytes =
      scratch_offset + static_cast<size_t>(std::min(chunks, aggregation_windows)) * window_bytes;
  std::vector<int> folded;
  std::vector<std::vector<int>> sent;
  for (int index = 0; index < chunks; ++index) {
    const size_t size = chunk_of(whole, chunk, index).bytes;
    const auto window = static_cast<size_t>(index % aggregation_windows);
    const bool is_used_again = index >= aggregation_windows;
    const auto before = static_cast<size_t>(is_used_again ? index - aggregation_windows : 0);
    const Place parts{Space::scratch, scratch_offset + window * window_bytes};
    for (int host = 0; host < hosts; ++host) {
      const Region room{Space::scratch, parts.offset + static_cast<size_t>(host) * stride, size};
      schedule.wait(schedule.receive(host, room, is_used_again ? folded[before] : no_step));
    }
    if (is_used_again) {
      for (const int taken : sent[before]) schedule.wait(taken);
    }
    const Region sum{Space::output, window * stride, size};
    folded.push_back(schedule.fold(sum, parts, hosts, stride, no_step));
    sent.emplace_back();
    for (int host = 0; host < hosts; ++host) sent.back().push_back(schedule.send(host, sum, folded.back()));
  }
}

}  // namespace shoal
