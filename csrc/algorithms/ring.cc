#include "algorithms/ring.h"

#include <numeric>

#include "algorithms/slice.h"

// The buffer is cut into one slice per rank. In step s of n - 1, rank r sends slice r - s to the next rank and folds
// its own slice r - s - 1 with the one that comes from the previous rank: what was folded in one step is sent in the
// next, and each slice collects one rank's part per step as it goes round. Four ranks, slices a to d; the number is how
// many parts a rank has summed after each step:
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
// A slice longer than a chunk is passed on chunk by chunk, so the links stay busy while a rank folds. Long slices go
// round in laps of a few chunks each: data to pass on is still in the cache, and scratch stays small.

namespace shoal {

namespace {

constexpr int chunks_per_lap = 8;

// The places of ranks in the ring, and the slices that move in a step.
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

// A ring of all ranks of a group.
std::vector<int> everyone(int size) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

void add_ring_all_reduce(Schedule& schedule, const std::vector<int>& ranks, int own, Region region, size_t element,
                         size_t chunk, const Ready& ready, const Finished& finished) {
  const Ring ring{own, static_cast<int>(ranks.size())};
  const int next = ranks[static_cast<size_t>(ring.next())], previous = ranks[static_cast<size_t>(ring.previous())];
  const auto boundaries = slice_boundaries(region.bytes, element, ring.size);
  chunk = chunk_bytes(element, chunk);
  const int chunks = most_chunks(boundaries, chunk);
  const auto piece_of = [&](int part, int index) {
    Region piece = chunk_of(slice(region.space, boundaries, part), chunk, index);
    piece.offset += region.offset;
    return piece;
  };
  std::vector<int> arrived(chunks_per_lap, no_step);  // the step that brought what the next step sends
  for (int lap = 0; lap < chunks; lap += chunks_per_lap) {
    const int end = std::min(chunks, lap + chunks_per_lap);
    for (int index = lap; index < end; ++index) {
      const Region first = piece_of(ring.sent(0), index);
      arrived[static_cast<size_t>(index - lap)] = ready(first);
      if (ring.size == 1) finished(first, arrived[static_cast<size_t>(index - lap)]);
    }
    for (int step = 0; step < 2 * (ring.size - 1); ++step) {
      for (int index = lap; index < end; ++index) {
        int& last = arrived[static_cast<size_t>(index - lap)];
        schedule.send(next, piece_of(ring.sent(step), index), last);
        const Region piece = piece_of(ring.received(step), index);
        last = step < ring.size - 1 ? schedule.receive_reduce(previous, piece, piece.place(), ready(piece))
                                    : schedule.receive(previous, piece, no_step);
        if (step >= ring.size - 2) finished(piece, last);
      }
    }
  }
}

Schedule ring_all_reduce(int rank, int size, size_t bytes, size_t element, size_t chunk) {
  Schedule schedule;
  if (size == 1) return schedule;
  add_ring_all_reduce(schedule, everyone(size), rank, {Space::output, 0, bytes}, element, chunk,
                      [](const Region&) { return no_step; }, [](const Region&, int) {});
  return schedule;
}

void add_ring_all_gather(Schedule& schedule, const std::vector<int>& ranks, int own, size_t bytes, size_t element,
                         size_t chunk, const Finished& finished) {
  const Ring ring{own, static_cast<int>(ranks.size())};
  const int next = ranks[static_cast<size_t>(ring.next())], previous = ranks[static_cast<size_t>(ring.previous())];
  const auto part = [&](int index) {
    return Region{Space::output, static_cast<size_t>(ranks[static_cast<size_t>(index)]) * bytes, bytes};
  };
  schedule.copy(part(own), {Space::input, 0}, no_step);
  chunk = chunk_bytes(element, chunk);
  const int chunks = chunk_count(bytes, chunk);
  std::vector<int> arrived(chunks_per_lap, no_step);
  for (int lap = 0; lap < chunks; lap += chunks_per_lap) {
    const int end = std::min(chunks, lap + chunks_per_lap);
    std::fill(arrived.begin(), arrived.end(), no_step);
    for (int step = 0; step < ring.size - 1; ++step) {
      const Region leaving = step == 0 ? Region{Space::input, 0, bytes} : part(ring.sent(step));
      for (int index = lap; index < end; ++index) {
        int& last = arrived[static_cast<size_t>(index - lap)];
        schedule.send(next, chunk_of(leaving, chunk, index), last);
        const Region piece = chunk_of(part(ring.received(step)), chunk, index);
        last = schedule.receive(previous, piece, no_step);
        finished(piece, last);
      }
    }
  }
}

Schedule ring_all_gather(int rank, int size, size_t bytes, size_t element, size_t chunk) {
  Schedule schedule;
  add_ring_all_gather(schedule, everyone(size), rank, bytes, element, chunk, [](const Region&, int) {});
  return schedule;
}

// Rank r is to end with slice r, so every slice leaves one step earlier than above: slice r - (s + 1) in step s. The
// input stays as it is: sums wait in scratch until they are sent on, in windows of one chunk that are used in turn.
// Between the arrival of a chunk and its departure lie the other chunks of a lap: with two windows more than a lap has
// chunks, one can be filled and one emptied at any time. If a rank's own part must be computed first, it is in a window
// too, which then takes the sum.
void add_ring_reduce_scatter(Schedule& schedule, const std::vector<int>& ranks, int own, size_t bytes, size_t element,
                             size_t chunk, const OwnPart& own_part) {
  const Ring ring{own, static_cast<int>(ranks.size())};
  const int next = ranks[static_cast<size_t>(ring.next())], previous = ranks[static_cast<size_t>(ring.previous())];
  chunk = std::min(chunk_bytes(element, chunk), std::max(bytes, element));
  const int chunks = chunk_count(bytes, chunk);
  const auto windows = static_cast<size_t>(std::min(chunks, chunks_per_lap) + 2);
  std::vector<int> emptied(windows, no_step);  // the step that read what the window held
  size_t used = 0;

  const auto take_window = [&](size_t piece_bytes) {
    const size_t window = used++ % windows;
    schedule.scratch_bytes = std::max(schedule.scratch_bytes, (window + 1) * chunk);
    return Part{{Space::scratch, window * chunk, piece_bytes}, emptied[window]};
  };
  const auto give_back = [&](const Region& region, int reader) {
    if (region.space == Space::scratch) emptied[region.offset / chunk] = reader;
  };
  const auto part_of = [&](int place, int index) {
    const size_t offset = static_cast<size_t>(ranks[static_cast<size_t>(place)]) * bytes;
    return own_part(chunk_of({Space::input, offset, bytes}, chunk, index), take_window);
  };
  for (int lap = 0; lap < chunks; lap += chunks_per_lap) {
    const int end = std::min(chunks, lap + chunks_per_lap);
    std::vector<Part> leaving;  // by chunk of the lap
    for (int index = lap; index < end; ++index) leaving.push_back(part_of(ring.sent(1), index));
    for (int step = 0; step < ring.size - 1; ++step) {
      for (int index = lap; index < end; ++index) {
        Part& sum = leaving[static_cast<size_t>(index - lap)];
        give_back(sum.region, schedule.send(next, sum.region, sum.ready));
        const Part part = part_of(ring.received(step + 1), index);
        if (step == ring.size - 2) {
          const Region result = chunk_of({Space::output, 0, bytes}, chunk, index);
          give_back(part.region, schedule.receive_reduce(previous, result, part.region.place(), part.ready));
        } else {
          sum = part.region.space == Space::scratch ? part : take_window(part.region.bytes);
          sum.ready = schedule.receive_reduce(previous, sum.region, part.region.place(), sum.ready);
        }
      }
    }
  }
}

Schedule ring_reduce_scatter(int rank, int size, size_t bytes, size_t element, size_t chunk) {
  Schedule schedule;
  if (size == 1) {
    schedule.copy({Space::output, 0, bytes}, {Space::input, 0}, no_step);
    return schedule;
  }
  add_ring_reduce_scatter(schedule, everyone(size), rank, bytes, element, chunk,
                          [](const Region& piece, const TakeWindow&) { return Part{piece, no_step}; });
  return schedule;
}

}  // namespace shoal
