#include "common/error.h"

#include <system_error>

namespace shoal {

Failure system_failure(const std::string& what, int error, int rank) {
  return Failure(Code::system, rank, what + ": " + std::generic_category().message(error), error);
}

}  // namespace shoal
