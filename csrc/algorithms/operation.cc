#include "algorithms/operation.h"

#include <string>

#include "common/error.h"
#include "common/reduce.h"

namespace shoal {

void require_possible(const Operation& op, int size) {
  if (op.root < 0 || op.root >= size) {
    throw Failure(Code::invalid, -1, "rank " + std::to_string(op.root) + " cannot be the root");
  }
  for (const Stripe& stripe : op.stripes) {
    const bool is_inside = stripe.offset <= op.bytes &&
                           stripe.part_bytes <= (op.bytes - stripe.offset) / static_cast<size_t>(size);
    const bool is_whole = op.collective != Collective::reduce_scatter ||
                          (stripe.offset % size_of(op.dtype) == 0 && stripe.part_bytes % size_of(op.dtype) == 0);
    if (!is_inside || !is_whole) {
      throw Failure(Code::invalid, -1, "a stripe of " + std::to_string(stripe.part_bytes) + " bytes a rank at " +
                                           std::to_string(stripe.offset) + " does not fit the buffer");
    }
  }
  if (!op.stripes.empty() && (op.input != op.output || op.algorithm != Algorithm::direct)) {
    throw Failure(Code::invalid, -1, "stripes are moved in place, by the algorithm direct");
  }
  const bool reduces = op.collective == Collective::all_reduce || op.collective == Collective::reduce ||
                       op.collective == Collective::reduce_scatter;
  if (!reduces) return;
  require_supported(op.dtype, op.reduction);
  if (op.bytes % size_of(op.dtype) != 0) {
    throw Failure(Code::invalid, -1, std::to_string(op.bytes) + " bytes are not whole elements");
  }
}

}  // namespace shoal
