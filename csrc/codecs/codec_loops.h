// The codecs of a vector unit: for each kind its loops.
#pragma once

#include "codecs/codec_unit.h"
#include "codecs/quantised.h"
#include "codecs/sampled.h"
#include "codecs/sparse.h"

namespace shoal {
namespace {

template <class U>
size_t encode_with(const Codec& codec, const float* values, size_t count, std::byte* payload, float* residual) {
  switch (codec.kind) {
    case CodecKind::int8: return encode_quantised<U, Int8<U>>(codec, values, count, payload, residual);
    case CodecKind::int4: return encode_quantised<U, Int4<U>>(codec, values, count, payload, residual);
    case CodecKind::fp8: return encode_quantised<U, Fp8<U>>(codec, values, count, payload, residual);
    case CodecKind::sign: return encode_quantised<U, Sign<U>>(codec, values, count, payload, residual);
    case CodecKind::random: return encode_sampled<U>(codec, values, count, payload, residual);
    default: return encode_sparse<U>(codec, values, count, payload, residual);
  }
}

template <class U, class Into, class IntoKept>
bool decode_into(const Codec& codec, const std::byte* payload, size_t bytes, float* out, size_t count, Into into,
                 IntoKept&& into_kept) {
  switch (codec.kind) {
    case CodecKind::int8: return decode_quantised<U, Int8<U>>(payload, out, count, into);
    case CodecKind::int4: return decode_quantised<U, Int4<U>>(payload, out, count, into);
    case CodecKind::fp8: return decode_quantised<U, Fp8<U>>(payload, out, count, into);
    case CodecKind::sign: return decode_quantised<U, Sign<U>>(payload, out, count, into);
    case CodecKind::random: return decode_sampled(codec, payload, out, count, into_kept);
    default: return decode_sparse<U>(codec, payload, bytes, out, count, into_kept);
  }
}

template <class U>
bool decode_with(const Codec& codec, const std::byte* payload, size_t bytes, float* out, size_t count) {
  return decode_into<U>(codec, payload, bytes, out, count, Replace<U>{}, ReplaceKept<U>(out, count));
}

template <class U>
bool decode_add_with(const Codec& codec, const std::byte* payload, size_t bytes, float* out, size_t count,
                     float factor) {
  return decode_into<U>(codec, payload, bytes, out, count, Add<U>{factor}, AddKept(factor));
}

template <class U>
constexpr CodecUnit make_codecs(const char* name) {
  return {name, U::is_present, encode_with<U>, decode_with<U>, decode_add_with<U>};
}

}  // namespace
}  // namespace shoal
