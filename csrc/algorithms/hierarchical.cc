#include "algorithms/hierarchical.h"

#include <algorithm>
#include <map>
#include <utility>

#include "algorithms/ring.h"
#include "algorithms/slice.h"
#include "algorithms/two_shot.h"

// k hosts of g ranks; the buffer is cut into g slices. On every host, rank i folds slice i of all ranks; the ranks i of
// all hosts reduce it in a ring; then every rank takes it from rank i of its own host.
//
//   host 0   rank 0  [A.]--fold-->[A]--.     .-->[A']--.
//            rank 1  [.B]--fold-->[B]--|-. .-|-->[B']--share-->
//   host 1   rank 2  [A.]--fold-->[A]--'-|-|-'-->[A']--.
//            rank 3  [.B]--fold-->[B]----'-'---->[B']--share-->
//
// What crosses the network is 2 (k - 1)/k S/g per rank, so 2 (k - 1)/k S per host, the least possible for any number of
// ranks on a host. The all-gather is the second half: rank i gets the parts of the ranks i of other hosts in a ring,
// and passes them on within the host; (k - 1)/k S per host cross the network. The reduce-scatter is the first half:
// rank i folds the parts that the ranks of its host have for the ranks i of all hosts, and these ranks reduce-scatter
// the sums in a ring.
//
// All of this is one schedule, piece by piece: while a piece crosses the network, later pieces are folded and earlier
// ones are shared. Pieces within a host move in the order in which the ring across hosts needs or finishes them, which
// both ends compute in the same way.
//
// A host with more ranks than the smallest host has ranks without a slice: they give their input and take the result.

namespace shoal {

namespace {

// The pieces of a rank's slice, in the order in which the ring across needs and finishes them.
struct Order {
  std::vector<Region> needed, finished;
};

}  // namespace

Hierarchy::Hierarchy(const std::vector<int>& hosts) {
  std::map<int, int> number_of;
  for (size_t rank = 0; rank < hosts.size(); ++rank) {
    const auto [found, is_new] = number_of.try_emplace(hosts[rank], static_cast<int>(ranks_.size()));
    if (is_new) ranks_.emplace_back();
    std::vector<int>& here = ranks_[static_cast<size_t>(found->second)];
    host_of_.push_back(found->second);
    index_of_.push_back(static_cast<int>(here.size()));
    here.push_back(static_cast<int>(rank));
  }
  const auto fewer = [](const auto& a, const auto& b) { return a.size() < b.size(); };
  smallest_ = static_cast<int>(std::min_element(ranks_.begin(), ranks_.end(), fewer)->size());
}

bool Hierarchy::is_even() const { return smallest_ * hosts() == ranks(); }

std::vector<int> Hierarchy::across(int index) const {
  std::vector<int> ranks;
  for (const auto& here : ranks_) ranks.push_back(here[static_cast<size_t>(index)]);
  return ranks;
}

Schedule hierarchical_all_reduce(const Hierarchy& hierarchy, int rank, size_t bytes, size_t element, size_t chunk) {
  Schedule schedule;
  const int host = hierarchy.host_of(rank), own = hierarchy.index_of(rank), slices_here = hierarchy.smallest();
  const std::vector<int>& here = hierarchy.ranks_on(host);
  const auto boundaries = slice_boundaries(bytes, element, slices_here);

  const auto order_of = [&](int index) {
    Order order;
    Schedule unused;
    add_ring_all_reduce(
        unused, hierarchy.across(index), host, slice(Space::output, boundaries, index), element, chunk,
        [&](const Region& piece) { return order.needed.push_back(piece), no_step; },
        [&](const Region& piece, int) { order.finished.push_back(piece); });
    return order;
  };

  for (int index = 0; index < slices_here; ++index) {
    if (index == own) continue;
    for (const Region& piece : order_of(index).needed) schedule.send(here[static_cast<size_t>(index)], piece, no_step);
  }
  const int count_here = static_cast<int>(here.size());
  const auto peer_at = [&](int shift) { return here[static_cast<size_t>((own + shift) % count_here)]; };
  const auto fold = [&](const Region& piece) {
    int folded = no_step;
    for (int shift = 1; shift < count_here; ++shift) {
      folded = schedule.receive_reduce(peer_at(shift), piece, piece.place(), folded);
    }
    return folded;
  };
  const auto share = [&](const Region& piece, int step) {
    for (int shift = 1; shift < count_here; ++shift) schedule.send(peer_at(shift), piece, step);
  };
  if (own < slices_here) {
    const Region region = slice(Space::output, boundaries, own);
    add_ring_all_reduce(schedule, hierarchy.across(own), host, region, element, chunk, fold, share);
  }

  // A rank folds a piece before it shares the result, so the piece has left when its result comes.
  for (int index = 0; index < slices_here; ++index) {
    if (index == own) continue;
    for (const Region& piece : order_of(index).finished) {
      schedule.receive(here[static_cast<size_t>(index)], piece, no_step);
    }
  }
  return schedule;
}

Schedule hierarchical_all_gather(const Hierarchy& hierarchy, int rank, size_t bytes, size_t element, size_t chunk) {
  Schedule schedule;
  const int host = hierarchy.host_of(rank), own = hierarchy.index_of(rank);
  const std::vector<int>& here = hierarchy.ranks_on(host);
  const int count_here = static_cast<int>(here.size());
  const auto parts = part_boundaries(bytes, hierarchy.hosts() * count_here);

  for (int shift = 1; shift < count_here; ++shift) {
    schedule.send(here[static_cast<size_t>((own + shift) % count_here)], {Space::input, 0, bytes}, no_step);
  }
  add_ring_all_gather(schedule, hierarchy.across(own), host, bytes, element, chunk, [&](const Region& piece, int step) {
    for (int shift = 1; shift < count_here; ++shift) {
      schedule.send(here[static_cast<size_t>((own + shift) % count_here)], piece, step);
    }
  });
  for (int index = 0; index < count_here; ++index) {
    if (index == own) continue;
    const int peer = here[static_cast<size_t>(index)];
    schedule.receive(peer, slice(Space::output, parts, peer), no_step);
    Schedule unused;
    add_ring_all_gather(unused, hierarchy.across(index), host, bytes, element, chunk,
                        [&](const Region& piece, int) { schedule.receive(peer, piece, no_step); });
  }
  return schedule;
}

Schedule hierarchical_reduce_scatter(const Hierarchy& hierarchy, int rank, size_t bytes, size_t element,
                                     size_t chunk) {
  if (hierarchy.hosts() == 1) return direct_reduce_scatter(rank, hierarchy.ranks(), bytes, element, chunk);
  Schedule schedule;
  const int host = hierarchy.host_of(rank), own = hierarchy.index_of(rank);
  const std::vector<int>& here = hierarchy.ranks_on(host);
  const int count_here = static_cast<int>(here.size());

  for (int index = 0; index < count_here; ++index) {
    if (index == own) continue;
    Schedule unused;
    add_ring_reduce_scatter(unused, hierarchy.across(index), host, bytes, element, chunk,
                            [&](const Region& piece, const TakeWindow&) {
                              schedule.send(here[static_cast<size_t>(index)], piece, no_step);
                              return Part{piece, no_step};
                            });
  }
  const auto fold = [&](const Region& piece, const TakeWindow& take_window) {
    if (count_here == 1) return Part{piece, no_step};
    Part sum = take_window(piece.bytes);
    Place from = piece.place();
    for (int shift = 1; shift < count_here; ++shift) {
      const int peer = here[static_cast<size_t>((own + shift) % count_here)];
      sum.ready = schedule.receive_reduce(peer, sum.region, from, sum.ready);
      from = sum.region.place();
    }
    return sum;
  };
  add_ring_reduce_scatter(schedule, hierarchy.across(own), host, bytes, element, chunk, fold);
  return schedule;
}

}  // namespace shoal
