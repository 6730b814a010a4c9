#include "common/error.h"

#include <sys/resource.h>

#include <cerrno>
#include <system_error>

namespace shoal {

namespace {

std::string advice(int error) {
  rlimit limit{};
  if (error != EMFILE || getrlimit(RLIMIT_NOFILE, &limit) != 0) return "";
  return " (the limit is " + std::to_string(limit.rlim_cur) + "; raise it with ulimit -n)";
}

}  // namespace

Failure system_failure(const std::string& what, int error, int rank) {
  return Failure(Code::system, rank, what + ": " + std::generic_category().message(error) + advice(error), error);
}

bool has_run_out(int error) { return error == EMFILE || error == ENFILE || error == ENOMEM; }

}  // namespace shoal
