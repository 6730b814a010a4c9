// Every algorithm over links, with the result that a plain reference gives.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "algorithms/double_tree.h"
#include "algorithms/halving_doubling.h"
#include "algorithms/one_shot.h"
#include "algorithms/pairwise.h"
#include "algorithms/ring.h"
#include "algorithms/trees.h"
#include "algorithms/two_shot.h"

namespace shoal::testing {

enum class Kind { all_reduce, all_gather, reduce_scatter, broadcast, reduce, gather, scatter, all_to_all };

// `count` elements of int32: in the whole buffer or, where ranks have parts, in one part.
struct Problem {
  int size;
  int root;
  size_t count;
  size_t chunk;  // bytes

  size_t bytes() const { return count * sizeof(int32_t); }
  size_t ranks() const { return static_cast<size_t>(size); }

  // Elements that `from` sends to `to` in an all-to-all: uneven, and often none.
  size_t count_between(size_t from, size_t to) const { return (3 * from + 5 * to) % 4 * count / 3; }
};

struct Algorithm {
  std::string name;
  Kind kind;
  Schedule (*make)(int rank, const Problem& problem);
};

inline Schedule make_all_to_all(int rank, const Problem& problem) {
  std::vector<Extent> sends, receives;
  size_t sent = 0, received = 0;
  for (size_t peer = 0; peer < problem.ranks(); ++peer) {
    const size_t leaving = problem.count_between(static_cast<size_t>(rank), peer) * sizeof(int32_t);
    const size_t coming = problem.count_between(peer, static_cast<size_t>(rank)) * sizeof(int32_t);
    sends.push_back({sent, leaving});
    receives.push_back({received, coming});
    sent += leaving;
    received += coming;
  }
  return pairwise_all_to_all(rank, sends, receives);
}

inline const std::vector<Algorithm>& algorithms() {
  using P = const Problem&;
  constexpr size_t element = sizeof(int32_t);
  static const std::vector<Algorithm> all{
      {"ring all-reduce", Kind::all_reduce,
       [](int rank, P p) { return ring_all_reduce(rank, p.size, p.bytes(), element, p.chunk); }},
      {"halving-doubling all-reduce", Kind::all_reduce,
       [](int rank, P p) { return halving_doubling_all_reduce(rank, p.size, p.bytes(), element); }},
      {"double tree all-reduce", Kind::all_reduce,
       [](int rank, P p) { return double_tree_all_reduce(rank, p.size, p.bytes(), element, p.chunk); }},
      {"one-shot all-reduce", Kind::all_reduce,
       [](int rank, P p) { return one_shot_all_reduce(rank, p.size, p.bytes(), element, p.chunk); }},
      {"two-shot all-reduce", Kind::all_reduce,
       [](int rank, P p) { return two_shot_all_reduce(rank, p.size, p.bytes(), element, p.chunk); }},
      {"ring all-gather", Kind::all_gather,
       [](int rank, P p) { return ring_all_gather(rank, p.size, p.bytes(), element, p.chunk); }},
      {"recursive all-gather", Kind::all_gather,
       [](int rank, P p) { return recursive_doubling_all_gather(rank, p.size, p.bytes()); }},
      {"direct all-gather", Kind::all_gather,
       [](int rank, P p) { return direct_all_gather(rank, p.size, p.bytes()); }},
      {"ring reduce-scatter", Kind::reduce_scatter,
       [](int rank, P p) { return ring_reduce_scatter(rank, p.size, p.bytes(), element, p.chunk); }},
      {"recursive reduce-scatter", Kind::reduce_scatter,
       [](int rank, P p) { return recursive_halving_reduce_scatter(rank, p.size, p.bytes()); }},
      {"direct reduce-scatter", Kind::reduce_scatter,
       [](int rank, P p) { return direct_reduce_scatter(rank, p.size, p.bytes(), element, p.chunk); }},
      {"tree broadcast", Kind::broadcast,
       [](int rank, P p) { return tree_broadcast(rank, p.size, p.root, p.bytes(), element, p.chunk); }},
      {"chain broadcast", Kind::broadcast,
       [](int rank, P p) { return chain_broadcast(rank, p.size, p.root, p.bytes(), element, p.chunk); }},
      {"tree reduce", Kind::reduce,
       [](int rank, P p) { return tree_reduce(rank, p.size, p.root, p.bytes(), element, p.chunk); }},
      {"chain reduce", Kind::reduce,
       [](int rank, P p) { return chain_reduce(rank, p.size, p.root, p.bytes(), element, p.chunk); }},
      {"direct gather", Kind::gather,
       [](int rank, P p) { return direct_gather(rank, p.size, p.root, p.bytes()); }},
      {"direct scatter", Kind::scatter,
       [](int rank, P p) { return direct_scatter(rank, p.size, p.root, p.bytes()); }},
      {"pairwise all-to-all", Kind::all_to_all, make_all_to_all},
  };
  return all;
}

inline const Algorithm& algorithm(const std::string& name) {
  for (const Algorithm& candidate : algorithms()) {
    if (candidate.name == name) return candidate;
  }
  throw Failure(Code::invalid, -1, "no algorithm is called " + name);
}

// A rank's input, and the space for the result: no bytes if the rank gets none.
struct Buffers {
  std::vector<uint32_t> input, output;
};

// Element `index` of the input of rank `rank`. Large, so that sums wrap.
inline uint32_t element_of(size_t rank, size_t index) {
  return static_cast<uint32_t>((rank + 1) * 2654435761u + index * 40503u * (rank + 7));
}

inline std::vector<uint32_t> elements_of(size_t rank, size_t count) {
  std::vector<uint32_t> elements(count);
  for (size_t index = 0; index < count; ++index) elements[index] = element_of(rank, index);
  return elements;
}

inline Buffers make_buffers(Kind kind, size_t rank, const Problem& problem) {
  const size_t ranks = problem.ranks(), count = problem.count;
  const auto garbage = [](size_t n) { return std::vector<uint32_t>(n, 0xdeadbeef); };
  const bool is_root = rank == static_cast<size_t>(problem.root);
  switch (kind) {
    case Kind::all_reduce:
      return {{}, elements_of(rank, count)};
    case Kind::all_gather:
      return {elements_of(rank, count), garbage(ranks * count)};
    case Kind::reduce_scatter:
      return {elements_of(rank, ranks * count), garbage(count)};
    case Kind::broadcast:
      return {{}, is_root ? elements_of(rank, count) : garbage(count)};
    case Kind::reduce:
      return {elements_of(rank, count), garbage(is_root ? count : 0)};
    case Kind::gather:
      return {elements_of(rank, count), garbage(is_root ? ranks * count : 0)};
    case Kind::scatter:
      return {elements_of(rank, is_root ? ranks * count : 0), garbage(count)};
    case Kind::all_to_all: {
      size_t sent = 0, received = 0;
      for (size_t peer = 0; peer < ranks; ++peer) {
        sent += problem.count_between(rank, peer);
        received += problem.count_between(peer, rank);
      }
      return {elements_of(rank, sent), garbage(received)};
    }
  }
  return {};
}

// The expected output of `rank`.
inline std::vector<uint32_t> expected_output(Kind kind, size_t rank, const Problem& problem) {
  const size_t ranks = problem.ranks(), count = problem.count;
  const auto root = static_cast<size_t>(problem.root);
  const auto sum = [&](size_t index) {
    uint32_t total = 0;
    for (size_t peer = 0; peer < ranks; ++peer) total += element_of(peer, index);
    return total;
  };
  std::vector<uint32_t> wanted;
  const bool takes_part = rank == root;
  switch (kind) {
    case Kind::reduce:
      if (!takes_part) break;
      [[fallthrough]];
    case Kind::all_reduce:
      for (size_t index = 0; index < count; ++index) wanted.push_back(sum(index));
      break;
    case Kind::reduce_scatter:
      for (size_t index = 0; index < count; ++index) wanted.push_back(sum(rank * count + index));
      break;
    case Kind::gather:
      if (!takes_part) break;
      [[fallthrough]];
    case Kind::all_gather:
      for (size_t peer = 0; peer < ranks; ++peer) {
        for (size_t index = 0; index < count; ++index) wanted.push_back(element_of(peer, index));
      }
      break;
    case Kind::broadcast:
      wanted = elements_of(root, count);
      break;
    case Kind::scatter:
      for (size_t index = 0; index < count; ++index) wanted.push_back(element_of(root, rank * count + index));
      break;
    case Kind::all_to_all:
      for (size_t peer = 0; peer < ranks; ++peer) {
        size_t offset = 0;
        for (size_t other = 0; other < rank; ++other) offset += problem.count_between(peer, other);
        for (size_t index = 0; index < problem.count_between(peer, rank); ++index) {
          wanted.push_back(element_of(peer, offset + index));
        }
      }
      break;
  }
  return wanted;
}

}  // namespace shoal::testing
