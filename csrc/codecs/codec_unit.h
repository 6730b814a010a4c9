// The vector units that codecs are compiled for. Each is one file, codecs_<unit>.cc, that compiles the same loops
// (codec_loops.h) for its instructions.
#pragma once

#include "codecs/codec.h"

namespace shoal {

struct CodecUnit {
  const char* name;      // that of its VectorUnit (common/vector_unit.h)
  bool (*is_present)();  // on the processor that runs this, where the VectorUnit is
  size_t (*encode)(const Codec& codec, const float* values, size_t count, std::byte* payload, float* residual);
  // False: the payload is not one of such a vector.
  bool (*decode)(const Codec& codec, const std::byte* payload, size_t bytes, float* out, size_t count);
  bool (*decode_add)(const Codec& codec, const std::byte* payload, size_t bytes, float* out, size_t count,
                     float factor);
};

extern const CodecUnit portable_codecs;
#if defined(__x86_64__)
extern const CodecUnit avx2_codecs;
extern const CodecUnit avx512_codecs;
#endif

}  // namespace shoal
