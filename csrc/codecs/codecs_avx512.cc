// The codecs in vectors of 64 bytes.
#if defined(__x86_64__)

#include <immintrin.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "codecs/codec_unit.h"

// For all that follows: see common/reduce_avx512.cc.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,bmi,popcnt"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,bmi,popcnt")
#endif

#include "codecs/codec_loops.h"

namespace shoal {
namespace {

struct Avx512 : Lanes<64> {
  // The masked forms, with every lane kept: g++ 12 warns about the plain ones.
  static constexpr __mmask16 every_lane = 0xffff;

  static void stream(float* to, Float vector) { _mm512_stream_ps(to, bits_as<__m512>(vector)); }
  static void fence() { _mm_sfence(); }

  static Int floor(Float vector) {
    constexpr int downwards = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
    return bits_as<Int>(_mm512_maskz_cvt_roundps_epi32(every_lane, bits_as<__m512>(vector), downwards));
  }
  static Double widen(Half vector) {
    return bits_as<Double>(_mm512_maskz_cvtps_pd(0xff, bits_as<__m256>(vector)));
  }
  static Int read_bytes(const std::byte* from) {
    return bits_as<Int>(_mm512_maskz_cvtepu8_epi32(every_lane, load<__m128i>(from)));
  }
  static Long read_long_bytes(const std::byte* from) {
    return bits_as<Long>(_mm512_maskz_cvtepu8_epi64(0xff, _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
  }
  static Int read_signed_bytes(const std::byte* from) {
    return bits_as<Int>(_mm512_maskz_cvtepi8_epi32(every_lane, load<__m128i>(from)));
  }
  static void write_bytes(std::byte* to, Int vector) {
    store(to, _mm512_maskz_cvtepi32_epi8(every_lane, bits_as<__m512i>(vector)));
  }
  static void write_bytes(std::byte* to, Long vector) {
    store(to, _mm_cvtsi128_si64(_mm512_maskz_cvtepi64_epi8(0xff, bits_as<__m512i>(vector))));
  }
  static uint32_t negatives(Int vector) { return _mm512_movepi32_mask(bits_as<__m512i>(vector)); }
  static uint32_t at_least(Int vector, int32_t least) {
    return _mm512_cmpge_epi32_mask(bits_as<__m512i>(vector), _mm512_set1_epi32(least));
  }

  static bool is_present() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("bmi") && __builtin_cpu_supports("popcnt");
  }
};

}  // namespace

constinit const CodecUnit avx512_codecs = make_codecs<Avx512>("avx512");

}  // namespace shoal

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
