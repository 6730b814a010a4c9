// The arithmetic of reduce.h in what the compiler makes of vectors of 16 bytes, on any processor.
#include "common/reduce_loops.h"

namespace shoal {
namespace {

struct Portable {
  static constexpr size_t width = 16;
  using Float16 = PairedHalves<Portable, Float16Format>;

  static bool is_present() { return true; }
};

}  // namespace

constinit const VectorUnit portable_unit = make_vector_unit<Portable>("portable");

}  // namespace shoal
