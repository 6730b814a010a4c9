#include "algorithms/one_shot.h"

#include "algorithms/rank_order.h"
#include "algorithms/slice.h"

// n - 1 messages of all S bytes per rank, all at once: the fewest steps and the most bytes, for small buffers. Every
// rank folds in the order of ranks, so all ranks get the same bits.

namespace shoal {

Schedule one_shot_all_reduce(int rank, int size, size_t bytes, size_t element, size_t chunk) {
  Schedule schedule;
  if (size == 1) return schedule;
  const Region whole{Space::output, 0, bytes};
  chunk = chunk_bytes(element, chunk);
  std::vector<std::vector<int>> sends;  // by chunk: the sum takes the place of what is sent
  for (int index = 0; index < chunk_count(bytes, chunk); ++index) {
    auto& steps = sends.emplace_back();
    for (int shift = 1; shift < size; ++shift) {
      steps.push_back(schedule.send((rank + shift) % size, chunk_of(whole, chunk, index), no_step));
    }
  }
  add_rank_order_fold(schedule, rank, size, whole, whole.place(), sends, chunk);
  return schedule;
}

}  // namespace shoal
