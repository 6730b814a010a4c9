// The arithmetic of reduce.h in vectors of 16 bytes, with the conversions of every 64-bit Arm processor.
#if defined(__aarch64__)

#include <arm_neon.h>

#include "common/reduce_loops.h"

namespace shoal {
namespace {

struct NeonFloat16 {
  static Vector<float, 4> widen(Vector<uint16_t, 4> half) {
    return bits_as<Vector<float, 4>>(vcvt_f32_f16(bits_as<float16x4_t>(half)));
  }
  static Vector<uint16_t, 4> narrow(Vector<float, 4> wide) {
    return bits_as<Vector<uint16_t, 4>>(vcvt_f16_f32(bits_as<float32x4_t>(wide)));
  }
};

struct Neon {
  static constexpr size_t width = 16;
  using Float16 = ConvertedHalves<Neon, NeonFloat16>;

  static bool is_present() { return true; }
};

}  // namespace

constinit const VectorUnit neon_unit = make_vector_unit<Neon>("neon");

}  // namespace shoal

#endif
