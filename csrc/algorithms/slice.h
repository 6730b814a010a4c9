// Where buffers are cut: into slices, one per rank, and into chunks, one per step.
//
// No cut falls inside an element, and cuts fall on multiples of 64 bytes (a line of the cache, the widest
// vector) where elements and chunks allow it. Slices differ by less than two lines; with less than a
// line per rank some slices are empty, which saves messages and costs no step.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "algorithms/schedule.h"

namespace shoal {

constexpr size_t line_bytes = 64;

inline size_t rounded_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// `parts` + 1 offsets: slice i of the buffer reaches from boundary i to boundary i + 1.
inline std::vector<size_t> slice_boundaries(size_t bytes, size_t element, int parts) {
  const size_t unit = line_bytes % element == 0 ? line_bytes : element;
  const size_t units = (bytes + unit - 1) / unit;
  std::vector<size_t> boundaries;
  boundaries.reserve(static_cast<size_t>(parts) + 1);
  for (size_t part = 0; part <= static_cast<size_t>(parts); ++part) {
    boundaries.push_back(std::min(bytes, units * part / static_cast<size_t>(parts) * unit));
  }
  return boundaries;
}

// The boundaries of `parts` slices of `bytes` each: a buffer that holds one part per rank.
inline std::vector<size_t> part_boundaries(size_t bytes, int parts) {
  std::vector<size_t> boundaries;
  boundaries.reserve(static_cast<size_t>(parts) + 1);
  for (size_t part = 0; part <= static_cast<size_t>(parts); ++part) boundaries.push_back(part * bytes);
  return boundaries;
}

// Slices first .. last - 1, which lie side by side.
inline Region slices(Space space, const std::vector<size_t>& boundaries, int first, int last) {
  const size_t begin = boundaries[static_cast<size_t>(first)];
  return {space, begin, boundaries[static_cast<size_t>(last)] - begin};
}

inline Region slice(Space space, const std::vector<size_t>& boundaries, int index) {
  return slices(space, boundaries, index, index + 1);
}

// The size of a chunk: `chunk`, rounded down to whole lines or at least whole elements; one element at least.
inline size_t chunk_bytes(size_t element, size_t chunk) {
  const size_t unit = chunk >= line_bytes && line_bytes % element == 0 ? line_bytes : element;
  return std::max(unit, chunk / unit * unit);
}

inline int chunk_count(size_t bytes, size_t chunk) { return static_cast<int>((bytes + chunk - 1) / chunk); }

// Chunk `index` of a region; of no bytes beyond its end.
inline Region chunk_of(const Region& region, size_t chunk, int index) {
  const size_t begin = std::min(region.bytes, static_cast<size_t>(index) * chunk);
  return {region.space, region.offset + begin, std::min(chunk, region.bytes - begin)};
}

// Bytes to fold or copy at once. The first-level cache, of 32 KiB or more, holds them from the read to the write.
inline size_t piece_bytes(int ranks) {
  constexpr size_t in_cache = 24 * 1024, least = 1024, most = 8 * 1024;
  return std::clamp(in_cache / static_cast<size_t>(ranks) / line_bytes * line_bytes, least, most);
}

}  // namespace shoal
