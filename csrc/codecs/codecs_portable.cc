// The codecs in what the compiler makes of vectors of 16 bytes, on any processor.
#include "codecs/codec_loops.h"

namespace shoal {
namespace {

struct Portable : Lanes<16> {
  static bool is_present() { return true; }
};

}  // namespace

constinit const CodecUnit portable_codecs = make_codecs<Portable>("portable");

}  // namespace shoal
