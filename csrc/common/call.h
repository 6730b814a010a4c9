// What a rank calls, in one number that the ranks of a host compare in passing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "common/types.h"

namespace shoal {

class Call {
 public:
  Call() = default;
  explicit Call(uint64_t word) : word_(word) {}
  // The type and the reduction count only if the collective reduces. The word holds the lower 35 bits of `bytes` and the
  // lower 16 of `root`.
  Call(Collective collective, Dtype dtype, Reduction reduction, int root, size_t bytes);

  uint64_t word() const { return word_; }
  // Such as "all_reduce of 1024 bytes of float32 (sum)".
  std::string text() const;

 private:
  uint64_t word_ = 0;
};

}  // namespace shoal
