#include "algorithms/operation.h"

#include <string>

#include "common/error.h"
#include "common/reduce.h"

namespace shoal {

void require_possible(const Operation& op, int size) {
  if (op.root < 0 || op.root >= size) {
    throw Failure(Code::invalid, -1, "rank " + std::to_string(op.root) + " cannot be the root");
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
