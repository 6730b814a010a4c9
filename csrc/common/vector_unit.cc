#include "common/vector_unit.h"

#include <atomic>
#include <cstring>

namespace shoal {
namespace {

// Widest first; the last one is present everywhere.
const VectorUnit* const all_units[] = {
#if defined(__x86_64__)
    &avx512_unit,
    &avx2_unit,
#elif defined(__aarch64__)
    &neon_unit,
#endif
    &portable_unit,
};

const VectorUnit* widest_unit() {
  for (const VectorUnit* unit : all_units)
    if (unit->is_present()) return unit;
  return &portable_unit;
}

std::atomic<const VectorUnit*>& chosen_unit() {
  static std::atomic<const VectorUnit*> unit{widest_unit()};
  return unit;
}

}  // namespace

const VectorUnit& current_vector_unit() { return *chosen_unit().load(std::memory_order_relaxed); }

bool use_vector_unit(const char* name) {
  for (const VectorUnit* unit : all_units) {
    if (std::strcmp(unit->name, name) != 0 || !unit->is_present()) continue;
    chosen_unit().store(unit, std::memory_order_relaxed);
    return true;
  }
  return false;
}

}  // namespace shoal
