#include "algorithms/ring.h"

#include "algorithms/slice.h"

// The buffer is cut into one slice per rank. In step s of n - 1, rank r sends slice r - s to the next rank
// and folds its own slice r - s - 1 with the one that comes from the previous rank: what was folded in one
// step is sent in the next, and each slice collects one rank's part per step as it goes round. Four ranks,
// slices a to d, who holds the sum of how many parts after each step:
//
//              rank 0     rank 1     rank 2     rank 3
//   step 0    a b c d2   a2 b c d   a b2 c d   a b c2 d     rank 0 sent a, rank 1 sent b, ...
//   step 1    a b c3 d   a b c d3   a3 b c d   a b3 c d
//   step 2    a b4 c d   a b c4 d   a b c d4   a4 b c d     each rank has one whole slice: reduce-scatter
//
// Another n - 1 steps pass the whole slices round, overwriting in place of folding: all-gather. By the same
// rule slice r - s leaves in step s, so the all-reduce is one loop of 2 (n - 1) steps.
//
// Per rank: 2 (n - 1) messages of S / n bytes each way for the all-reduce, n - 1 messages of one part for the
// others. Slice i is folded in the order i, i + 1, ... round the ring, on its way: the same for every rank
// and every run.
//
// A slice longer than a chunk is passed on chunk by chunk, so the links stay busy while a rank folds. Long
// slices go round in laps of a few chunks each: what is passed on is still in the cache, and scratch stays
// small.

namespace shoal {

namespace {

constexpr int chunks_per_lap = 8;

// Who is where in the ring, and what moves in a step.
struct Ring {
  int rank, size;

  int next() const { return (rank + 1) % size; }
  int previous() const { return (rank + size - 1) % size; }
  int sent(int step) const { return (rank - step + 2 * size) % size; }
  int received(int step) const { return sent(step + 1); }
};

// The number of chunks of the longest slice.
int most_chunks(const std::vector<size_t>& boundaries, size_t chunk) {
  size_t longest = 0;
  for (size_t i = 1; i < boundaries.size(); ++i) {
    longest = std::max(longest, boundaries[i] - boundaries[i - 1]);
  }
  return chunk_count(longest, chunk);
}

}  // namespace

Schedule ring_all_reduce(int rank, int size, size_t bytes, size_t element, size_t chunk) {
  Schedule schedule;
  if (size == 1) return schedule;
  const Ring ring{rank, size};
  const auto boundaries = slice_boundaries(bytes, element, size);
  chunk = chunk_bytes(element, chunk);
  const int chunks = most_chunks(boundaries, chunk);
  std::vector<int> arrived(chunks_per_lap, no_step);  // the step that brought what the next step sends
  for (int lap = 0; lap < chunks; lap += chunks_per_lap) {
    const int end = std::min(chunks, lap + chunks_per_lap);
    std::fill(arrived.begin(), arrived.end(), no_step);
    for (int step = 0; step < 2 * (size - 1); ++step) {
      const Region leaving = slice(Space::output, boundaries, ring.sent(step));
      const Region coming = slice(Space::output, boundaries, ring.received(step));
      for (int index = lap; index < end; ++index) {
        int& ready = arrived[static_cast<size_t>(index - lap)];
        schedule.send(ring.next(), chunk_of(leaving, chunk, index), ready);
        const Region piece = chunk_of(coming, chunk, index);
        ready = step < size - 1 ? schedule.receive_reduce(ring.previous(), piece, piece.place(), no_step)
                                : schedule.receive(ring.previous(), piece, no_step);
      }
    }
  }
  return schedule;
}

Schedule ring_all_gather(int rank, int size, size_t bytes, size_t element, size_t chunk) {
  Schedule schedule;
  const Ring ring{rank, size};
  const auto boundaries = part_boundaries(bytes, size);
  schedule.copy(slice(Space::output, boundaries, rank), {Space::input, 0}, no_step);
  chunk = chunk_bytes(element, chunk);
  const int chunks = chunk_count(bytes, chunk);
  std::vector<int> arrived(chunks_per_lap, no_step);
  for (int lap = 0; lap < chunks; lap += chunks_per_lap) {
    const int end = std::min(chunks, lap + chunks_per_lap);
    std::fill(arrived.begin(), arrived.end(), no_step);
    for (int step = 0; step < size - 1; ++step) {
      const Region own{Space::input, 0, bytes};
      const Region leaving = step == 0 ? own : slice(Space::output, boundaries, ring.sent(step));
      const Region coming = slice(Space::output, boundaries, ring.received(step));
      for (int index = lap; index < end; ++index) {
        int& ready = arrived[static_cast<size_t>(index - lap)];
        schedule.send(ring.next(), chunk_of(leaving, chunk, index), ready);
        ready = schedule.receive(ring.previous(), chunk_of(coming, chunk, index), no_step);
      }
    }
  }
  return schedule;
}

// Rank r is to end with slice r, so every slice leaves one step earlier than above: slice r - (s + 1) in step
// s. The input stays as it is: sums wait in scratch until they are sent on, in windows of one chunk that are
// used in turn. Between the arrival of a chunk and its departure lie the other chunks of a lap: with two
// windows more than a lap has chunks, one can be filled and one emptied at any time.
Schedule ring_reduce_scatter(int rank, int size, size_t bytes, size_t element, size_t chunk) {
  Schedule schedule;
  if (size == 1) {
    schedule.copy({Space::output, 0, bytes}, {Space::input, 0}, no_step);
    return schedule;
  }
  const Ring ring{rank, size};
  const auto boundaries = part_boundaries(bytes, size);
  chunk = std::min(chunk_bytes(element, chunk), std::max(bytes, element));
  const int chunks = chunk_count(bytes, chunk);
  const int windows = std::min(std::min(chunks, chunks_per_lap) + 2, chunks * (size - 2));
  schedule.scratch_bytes = static_cast<size_t>(windows) * chunk;

  struct Leaving {
    Region region;
    int ready = no_step;  // the step that put it there
  };
  std::vector<int> emptied(static_cast<size_t>(windows), no_step);  // the step that sent what the window held
  size_t window = 0;
  for (int lap = 0; lap < chunks; lap += chunks_per_lap) {
    const int end = std::min(chunks, lap + chunks_per_lap);
    std::vector<Leaving> next_to_leave;  // by chunk of the lap; at first, input
    const Region first_slice = slice(Space::input, boundaries, ring.sent(1));
    for (int index = lap; index < end; ++index)
      next_to_leave.push_back({chunk_of(first_slice, chunk, index)});
    for (int step = 0; step < size - 1; ++step) {
      const Region own_slice = slice(Space::input, boundaries, ring.received(step + 1));
      for (int index = lap; index < end; ++index) {
        auto& [leaving, ready] = next_to_leave[static_cast<size_t>(index - lap)];
        const int sent = schedule.send(ring.next(), leaving, ready);
        if (leaving.space == Space::scratch) emptied[leaving.offset / chunk] = sent;
        const Region own = chunk_of(own_slice, chunk, index);
        if (step == size - 2) {
          const Region result = chunk_of({Space::output, 0, bytes}, chunk, index);
          schedule.receive_reduce(ring.previous(), result, own.place(), no_step);
        } else {
          leaving = {Space::scratch, window * chunk, own.bytes};
          ready = schedule.receive_reduce(ring.previous(), leaving, own.place(), emptied[window]);
          window = (window + 1) % emptied.size();
        }
      }
    }
  }
  return schedule;
}

}  // namespace shoal
