// The codecs in vectors of 32 bytes.
#if defined(__x86_64__)

#include <immintrin.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "codecs/codec_unit.h"

// For all that follows: see common/reduce_avx2.cc.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,bmi,popcnt"))), apply_to = function)
#else
#pragma GCC target("avx2,bmi,popcnt")
#endif

#include "codecs/codec_loops.h"

namespace shoal {
namespace {

struct Avx2 : Lanes<32> {
  static void stream(float* to, Float vector) { _mm256_stream_ps(to, bits_as<__m256>(vector)); }
  static void fence() { _mm_sfence(); }

  static Int floor(Float vector) {
    return bits_as<Int>(_mm256_cvttps_epi32(_mm256_floor_ps(bits_as<__m256>(vector))));
  }
  static Int read_bytes(const std::byte* from) {
    return bits_as<Int>(_mm256_cvtepu8_epi32(_mm_loadu_si64(from)));
  }
  static Int read_signed_bytes(const std::byte* from) {
    return bits_as<Int>(_mm256_cvtepi8_epi32(_mm_loadu_si64(from)));
  }
  static uint32_t negatives(Int vector) {
    return static_cast<uint32_t>(_mm256_movemask_ps(bits_as<__m256>(vector)));
  }
  static uint32_t at_least(Int vector, int32_t least) { return ~negatives(vector < least) & 0xff; }

  static bool is_present() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("popcnt");
  }
};

}  // namespace

constinit const CodecUnit avx2_codecs = make_codecs<Avx2>("avx2");

}  // namespace shoal

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
