// Collectives as a rank calls them, with the problems and the reference of tests/collectives.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "algorithms/operation.h"
#include "tests/collectives.h"
#include "transport/shared_buffers.h"

namespace shoal::testing {

inline constexpr Kind kinds[] = {Kind::all_reduce, Kind::all_gather, Kind::reduce_scatter, Kind::broadcast,
                                 Kind::reduce,     Kind::gather,     Kind::scatter,        Kind::all_to_all};

inline Collective collective_of(Kind kind) {
  switch (kind) {
    case Kind::all_reduce:
      return Collective::all_reduce;
    case Kind::all_gather:
      return Collective::all_gather;
    case Kind::reduce_scatter:
      return Collective::reduce_scatter;
    case Kind::broadcast:
      return Collective::broadcast;
    case Kind::reduce:
      return Collective::reduce;
    case Kind::gather:
      return Collective::gather;
    case Kind::scatter:
      return Collective::scatter;
    case Kind::all_to_all:
      return Collective::all_to_all;
  }
  return Collective::barrier;
}

// Elements in memory of a rank, private or shared; null if there are none.
class Elements {
 public:
  Elements(const std::vector<uint32_t>& values, SharedBuffers& buffers, bool is_shared)
      : buffers_(buffers), count_(values.size()), is_shared_(is_shared && count_ > 0) {
    if (is_shared_) {
      data_ = static_cast<uint32_t*>(buffers_.allocate(count_ * sizeof(uint32_t)));
    } else if (count_ > 0) {
      own_.resize(count_);
      data_ = own_.data();
    }
    std::copy(values.begin(), values.end(), data_);
  }
  ~Elements() {
    if (is_shared_) buffers_.release(data_);
  }
  Elements(const Elements&) = delete;

  uint32_t* data() { return data_; }
  std::vector<uint32_t> values() const { return {data_, data_ + count_}; }

 private:
  SharedBuffers& buffers_;
  const size_t count_;
  const bool is_shared_;
  std::vector<uint32_t> own_;
  uint32_t* data_ = nullptr;
};

inline Operation operation_of(Kind kind, const Problem& problem, int rank, const void* input, void* output) {
  Operation operation;
  operation.collective = collective_of(kind);
  operation.dtype = Dtype::int32;
  operation.root = problem.root;
  operation.input = input;
  operation.output = output;
  operation.bytes = problem.bytes();
  operation.deadline = Deadline::after(60);
  if (kind == Kind::all_to_all) {
    const auto own = static_cast<size_t>(rank);
    for (size_t peer = 0; peer < problem.ranks(); ++peer) {
      operation.send_bytes.push_back(problem.count_between(own, peer) * sizeof(uint32_t));
      operation.receive_bytes.push_back(problem.count_between(peer, own) * sizeof(uint32_t));
    }
  }
  return operation;
}

}  // namespace shoal::testing
