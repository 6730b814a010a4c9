#include "algorithms/operation.h"

#include <string>

#include "common/error.h"
#include "common/reduce.h"

namespace shoal {

namespace {

void require_stripes(const Operation& op, size_t size, bool one_host) {
  const bool reduces = op.collective == Collective::reduce_scatter;
  if (!reduces && op.collective != Collective::all_gather) {
    throw Failure(Code::invalid, -1, "stripes are gathered or reduce-scattered");
  }
  if (op.input != op.output || op.algorithm != Algorithm::direct || !one_host) {
    throw Failure(Code::invalid, -1, "stripes are moved in place, within a host, by the algorithm direct");
  }
  const size_t element = reduces ? size_of(op.dtype) : 1;
  size_t end = 0;  // of the stripe before
  for (const Stripe& stripe : *op.stripes) {
    const bool is_inside = stripe.offset <= op.bytes && stripe.part_bytes <= (op.bytes - stripe.offset) / size;
    const bool is_whole = stripe.offset % element == 0 && stripe.part_bytes % element == 0;
    if (!is_inside || !is_whole || stripe.offset < end) {
      const char* const why = !is_inside  ? "is not within the buffer"
                              : !is_whole ? "is not of whole elements"
                                          : "overlaps the one before it";
      throw Failure(Code::invalid, -1, "a stripe of " + std::to_string(stripe.part_bytes) + " bytes a rank at " +
                                           std::to_string(stripe.offset) + " " + why);
    }
    end = stripe.offset + size * stripe.part_bytes;
  }
}

}  // namespace

Call call_of(const Operation& op) {
  const size_t bytes = op.collective == Collective::all_to_all ? 0 : op.bytes;
  return Call(op.collective, op.dtype, op.reduction, op.root, bytes);
}

void require_possible(const Operation& op, int size, bool one_host) {
  if (op.root < 0 || op.root >= size) {
    throw Failure(Code::invalid, -1, "rank " + std::to_string(op.root) + " cannot be the root");
  }
  if (op.stripes) require_stripes(op, static_cast<size_t>(size), one_host);
  if (!is_reducing(op.collective)) return;
  require_supported(op.dtype, op.reduction);
  if (op.bytes % size_of(op.dtype) != 0) {
    throw Failure(Code::invalid, -1, std::to_string(op.bytes) + " bytes are not whole elements");
  }
}

}  // namespace shoal
