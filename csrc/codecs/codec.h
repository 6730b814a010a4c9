// Encodes a vector of float32 into fewer bytes, a payload, and decodes it.
//
// The kinds, and how their payloads lie, are told in shoal/collectives/codecs/ (with_torch.py),
// whose code gives the same bytes with torch's operators. Results do not depend on which vector unit is used. An element
// that is infinite or NaN makes its decoded block (chunk, or stretch) have a NaN. Functions have no state.
#pragma once

#include <cstddef>
#include <cstdint>

namespace shoal {

inline constexpr size_t codec_block = 1024;  // elements that share a scale
inline constexpr size_t codec_chunk = 4096;  // elements among which sparse kinds choose

// The numbers are those of shoal/collectives/codecs/native.py.
enum class CodecKind : int { int8, int4, fp8, sign, topk, topk_2bit, threshold, random };

struct Codec {
  CodecKind kind;
  size_t number;  // topk and random send one element of `number`; threshold those above `number` times the rms
  uint64_t seed;  // of roundings, and of the positions of `random`
};

// Bytes of a payload; of threshold the most.
size_t payload_bytes(const Codec& codec, size_t count);

// Returns the bytes written. `residual`, unless null, gets values - decoded; it may be `values`, otherwise nothing
// overlaps. Pointers need no alignment beyond the element's; a payload needs none.
//
// Throws Failure(Code::invalid) where the codec does not exist, or the payload's `capacity` is less than payload_bytes.
size_t encode(const Codec& codec, const float* values, size_t count, void* payload, size_t capacity,
              float* residual);

// out = decoded, and out += factor * decoded, with the product rounded first.
//
// Throws Failure(Code::invalid) where the payload is too short, or has positions outside of the vector; `out` is then
// undefined.
void decode(const Codec& codec, const void* payload, size_t bytes, float* out, size_t count);
void decode_add(const Codec& codec, const void* payload, size_t bytes, float* out, size_t count, float factor);

}  // namespace shoal
