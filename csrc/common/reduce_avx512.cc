// The arithmetic of reduce.h in vectors of 64 bytes.
#if defined(__x86_64__)

#include <immintrin.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "common/vector_unit.h"

// For all that follows. What stands above may share its code with other files, so it must not be compiled for
// instructions that a processor may lack.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq")
#endif

#include "common/reduce_loops.h"

namespace shoal {
namespace {

struct Avx512Float16 {
  // The masked forms, with every lane kept: g++ 12 warns about the plain ones, because they leave masked lanes
  // undefined.
  static constexpr __mmask16 every_lane = 0xffff;

  static Vector<float, 16> widen(Vector<uint16_t, 16> half) {
    return bits_as<Vector<float, 16>>(_mm512_maskz_cvtph_ps(every_lane, bits_as<__m256i>(half)));
  }

  static Vector<uint16_t, 16> narrow(Vector<float, 16> wide) {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return bits_as<Vector<uint16_t, 16>>(_mm512_maskz_cvtps_ph(every_lane, bits_as<__m512>(wide), nearest));
  }
};

struct Avx512 {
  static constexpr size_t width = 64;
  using Float16 = ConvertedHalves<Avx512, Avx512Float16>;

  struct StreamingStore {
    template <typename V>
    static void put(std::byte* to, V vector) {
      if constexpr (sizeof(V) == width)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to), bits_as<__m512i>(vector));
      else
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to), bits_as<__m256i>(vector));
    }
  };
  static void fence() { _mm_sfence(); }

  static bool is_present() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  }
};

}  // namespace

constinit const VectorUnit avx512_unit = make_vector_unit<Avx512>("avx512");

}  // namespace shoal

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
