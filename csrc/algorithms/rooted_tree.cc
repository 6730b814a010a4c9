#include "algorithms/rooted_tree.h"

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
    // What comes down was made from what this rank sent up, so nothing here still needs the region.
    if (tree.parent >= 0) here = schedule.receive(tree.parent, piece, no_step);
    for (const int child : tree.children) schedule.send(child, piece, here);
  }
}

Schedule reduce_along(const TreePlace& tree, size_t bytes, size_t element, size_t chunk) {
  Schedule schedule;
  const Region own{Space::input, 0, bytes};
  const bool is_root = tree.parent < 0;
  if (is_root && tree.children.empty()) {
    schedule.copy({Space::output, 0, bytes}, own.place(), no_step);
    return schedule;
  }
  constexpr int windows_in_scratch = 4;  // one fills while another empties, and two to absorb what is uneven
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

}  // namespace shoal
