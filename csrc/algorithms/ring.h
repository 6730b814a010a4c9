// Ring algorithms: every rank sends to the next rank only, and receives from the previous one only.
//
// Patarasuk, Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations (2009).
#pragma once

#include <functional>
#include <vector>

#include "algorithms/schedule.h"

namespace shoal {

// In place in the output. `chunk`: the most bytes of one step.
Schedule ring_all_reduce(int rank, int size, size_t bytes, size_t element, size_t chunk);

// `bytes` per rank; the output holds size * bytes.
Schedule ring_all_gather(int rank, int size, size_t bytes, size_t element, size_t chunk);

// The input holds size * bytes, the output `bytes`. Scratch: about ten chunks, or two parts if they are
// smaller.
Schedule ring_reduce_scatter(int rank, int size, size_t bytes, size_t element, size_t chunk);

// --- a ring as a part of a schedule: the one of `ranks` in which this rank is at the place `own` ---

// Adds the steps before a piece may leave or be folded; returns the last of them.
using Ready = std::function<int(const Region& piece)>;

// Called for each piece that holds its result after `step`.
using Finished = std::function<void(const Region& piece, int step)>;

// In place in the region. `ready` is asked once for each piece, in the order in which they are needed.
void add_ring_all_reduce(Schedule& schedule, const std::vector<int>& ranks, int own, Region region, size_t element,
                         size_t chunk, const Ready& ready, const Finished& finished);

// The part of each rank goes to its place among those of the whole group, in the output. `finished` is called for the
// parts of the other ranks only.
void add_ring_all_gather(Schedule& schedule, const std::vector<int>& ranks, int own, size_t bytes, size_t element,
                         size_t chunk, const Finished& finished);

// A rank's own addend for a piece of the input, valid after `ready`: in the input itself, or in a window of scratch.
struct Part {
  Region region;
  int ready = no_step;
};

// Gives a window of that many bytes, which may be written once `ready` is done.
using TakeWindow = std::function<Part(size_t bytes)>;
using OwnPart = std::function<Part(const Region& piece, const TakeWindow& take_window)>;

// Sums this rank's part of each rank's input into the output. `own_part` is asked once for each piece, in the order in
// which they are needed. Two ranks at least. Uses scratch from its beginning on.
void add_ring_reduce_scatter(Schedule& schedule, const std::vector<int>& ranks, int own, size_t bytes, size_t element,
                             size_t chunk, const OwnPart& own_part);

}  // namespace shoal
