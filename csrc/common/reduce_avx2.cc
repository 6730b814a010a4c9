// The arithmetic of reduce.h in vectors of 32 bytes.
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
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c")
#endif

#include "common/reduce_loops.h"

namespace shoal {
namespace {

struct Avx2Float16 {
  static Vector<float, 8> widen(Vector<uint16_t, 8> half) {
    return bits_as<Vector<float, 8>>(_mm256_cvtph_ps(bits_as<__m128i>(half)));
  }
  static Vector<uint16_t, 8> narrow(Vector<float, 8> wide) {
    return bits_as<Vector<uint16_t, 8>>(_mm256_cvtps_ph(bits_as<__m256>(wide), _MM_FROUND_TO_NEAREST_INT));
  }
};

struct Avx2 {
  static constexpr size_t width = 32;
  using Float16 = ConvertedHalves<Avx2, Avx2Float16>;

  struct StreamingStore {
    template <typename V>
    static void put(std::byte* to, V vector) {
      if constexpr (sizeof(V) == width)
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to), bits_as<__m256i>(vector));
      else
        _mm_stream_si128(reinterpret_cast<__m128i*>(to), bits_as<__m128i>(vector));
    }
  };
  static void fence() { _mm_sfence(); }

  static bool is_present() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  }
};

}  // namespace

constinit const VectorUnit avx2_unit = make_vector_unit<Avx2>("avx2");

}  // namespace shoal

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
