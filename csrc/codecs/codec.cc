#include "codecs/codec.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "codecs/codec_unit.h"
#include "common/error.h"
#include "common/vector_unit.h"

namespace shoal {
namespace {

size_t divided_up(size_t count, size_t by) { return (count + by - 1) / by; }

size_t position_bytes(size_t count) { return divided_up(count * 12, 8); }

// The codecs of the vector unit in use; other units than those of x86 have the compiler's vectors.
const CodecUnit& current_codecs() {
#if defined(__x86_64__)
  const char* name = current_vector_unit().name;
  for (const CodecUnit* unit : {&avx512_codecs, &avx2_codecs})
    if (std::strcmp(unit->name, name) == 0 && unit->is_present()) return *unit;
#endif
  return portable_codecs;
}

void require_codec(const Codec& codec) {
  const auto [least, most] = [&]() -> std::pair<size_t, size_t> {
    switch (codec.kind) {
      case CodecKind::topk:
      case CodecKind::topk_2bit:
      case CodecKind::random: return {2, codec_chunk};
      case CodecKind::threshold: return {1, 64};
      default: return {0, codec_chunk};
    }
  }();
  if (codec.kind < CodecKind::int8 || codec.kind > CodecKind::random)
    throw Failure(Code::invalid, -1, "there is no codec " + std::to_string(static_cast<int>(codec.kind)));
  if (codec.number < least || codec.number > most)
    throw Failure(Code::invalid, -1,
                  "a codec's number is " + std::to_string(codec.number) + ", not from " + std::to_string(least) +
                      " to " + std::to_string(most));
}

size_t chunk_bytes(const Codec& codec, size_t count) {
  if (codec.kind == CodecKind::threshold) return 2 + position_bytes(count) + 4 * count;
  const size_t kept = divided_up(count, codec.number);
  return position_bytes(kept) + (codec.kind == CodecKind::topk ? 4 * kept : divided_up(kept, 4) + 4);
}

[[noreturn]] void refuse_payload(size_t bytes, size_t count) {
  throw Failure(Code::invalid, -1,
                "a payload of " + std::to_string(bytes) + " bytes is not one of " + std::to_string(count) +
                    " elements");
}

void require_bytes(const Codec& codec, size_t bytes, size_t count) {
  require_codec(codec);
  if (codec.kind != CodecKind::threshold && bytes < payload_bytes(codec, count)) refuse_payload(bytes, count);
}

}  // namespace

size_t payload_bytes(const Codec& codec, size_t count) {
  const size_t scales = 4 * divided_up(count, codec_block);
  switch (codec.kind) {
    case CodecKind::int8:
    case CodecKind::fp8: return scales + count;
    case CodecKind::int4: return scales + divided_up(count, 2);
    case CodecKind::sign: return scales + divided_up(count, 8);
    case CodecKind::random: return 4 * divided_up(count, codec.number);
    default: break;
  }
  const size_t rest = count % codec_chunk;
  return count / codec_chunk * chunk_bytes(codec, codec_chunk) + (rest > 0 ? chunk_bytes(codec, rest) : 0);
}

size_t encode(const Codec& codec, const float* values, size_t count, void* payload, size_t capacity,
              float* residual) {
  require_codec(codec);
  if (capacity < payload_bytes(codec, count))
    throw Failure(Code::invalid, -1,
                  "a payload of " + std::to_string(count) + " elements takes " +
                      std::to_string(payload_bytes(codec, count)) + " bytes, not " + std::to_string(capacity));
  return current_codecs().encode(codec, values, count, static_cast<std::byte*>(payload), residual);
}

void decode(const Codec& codec, const void* payload, size_t bytes, float* out, size_t count) {
  require_bytes(codec, bytes, count);
  if (!current_codecs().decode(codec, static_cast<const std::byte*>(payload), bytes, out, count))
    refuse_payload(bytes, count);
}

void decode_add(const Codec& codec, const void* payload, size_t bytes, float* out, size_t count, float factor) {
  require_bytes(codec, bytes, count);
  if (!current_codecs().decode_add(codec, static_cast<const std::byte*>(payload), bytes, out, count, factor))
    refuse_payload(bytes, count);
}

}  // namespace shoal
