#include "algorithms/rank_order.h"

#include "algorithms/slice.h"

// Scratch is two windows, used in turn, with room for one chunk of every rank. A chunk's parts are collected
// in one of them, the rank's own by a copy, while the fold of the chunk before reads the other.

namespace shoal {

std::vector<int> add_rank_order_fold(Schedule& schedule, int rank, int size, Region own, Place result,
                                     const std::vector<std::vector<int>>& sends, size_t chunk) {
  constexpr int windows = 2;
  const int chunks = chunk_count(own.bytes, chunk);
  const size_t stride = std::min(chunk, own.bytes);
  const size_t window_bytes = static_cast<size_t>(size) * stride;
  schedule.scratch_bytes = static_cast<size_t>(std::min(chunks, windows)) * window_bytes;
  std::vector<int> folded;
  for (int index = 0; index < chunks; ++index) {
    const Region piece = chunk_of(own, chunk, index);
    const Place parts{Space::scratch, static_cast<size_t>(index % windows) * window_bytes};
    const int emptied = index >= windows ? folded[static_cast<size_t>(index - windows)] : no_step;
    const auto room = [&](int part) {
      return Region{Space::scratch, parts.offset + static_cast<size_t>(part) * stride, piece.bytes};
    };
    schedule.copy(room(rank), piece.place(), no_step);  // comes after earlier folds in any case
    for (int part = 0; part < size; ++part) {
      if (part != rank) schedule.wait(schedule.receive(part, room(part), emptied));
    }
    if (!sends.empty()) {
      for (const int sent : sends[static_cast<size_t>(index)]) schedule.wait(sent);
    }
    const Region sum{result.space, result.offset + piece.offset - own.offset, piece.bytes};
    folded.push_back(schedule.fold(sum, parts, size, stride, no_step));
  }
  return folded;
}

}  // namespace shoal
