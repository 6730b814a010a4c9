#include "common/call.h"

namespace shoal {

namespace {

// From the lowest bit: 4 bits of the collective, 5 of the type, 4 of the reduction, 16 of the root, 35 of the bytes.
constexpr int dtype_at = 4, reduction_at = 9, root_at = 13, bytes_at = 29;

constexpr uint64_t bits(uint64_t word, int from, int to) { return word >> from & ((uint64_t{1} << (to - from)) - 1); }

constexpr const char* collectives[] = {"barrier", "all_reduce", "all_gather", "reduce_scatter", "broadcast",
                                       "reduce",  "gather",     "scatter",    "all_to_all"};
constexpr const char* dtypes[] = {"float32", "float64", "float16", "bfloat16", "int8",
                                  "uint8",   "int16",   "int32",   "int64",    "bool"};
constexpr const char* reductions[] = {"sum",     "average", "minimum", "maximum",
                                      "product", "and",     "or",      "xor"};

template <size_t count>
std::string name(const char* const (&names)[count], uint64_t number) {
  return number < count ? names[number] : "unknown";
}

}  // namespace

Call::Call(Collective collective, Dtype dtype, Reduction reduction, int root, size_t bytes)
    : word_(static_cast<uint64_t>(collective) | (static_cast<uint64_t>(root) & 0xffff) << root_at |
            static_cast<uint64_t>(bytes) << bytes_at) {
  if (!is_reducing(collective)) return;
  word_ |= static_cast<uint64_t>(dtype) << dtype_at | static_cast<uint64_t>(reduction) << reduction_at;
}

std::string Call::text() const {
  const auto collective = static_cast<Collective>(bits(word_, 0, dtype_at));
  std::string text = name(collectives, bits(word_, 0, dtype_at));
  if (collective == Collective::barrier || collective == Collective::all_to_all) return text;
  text += " of " + std::to_string(bits(word_, bytes_at, 64)) + " bytes";
  if (is_reducing(collective)) {
    text += " of " + name(dtypes, bits(word_, dtype_at, reduction_at));
    text += " (" + name(reductions, bits(word_, reduction_at, root_at)) + ")";
  }
  const uint64_t root = bits(word_, root_at, bytes_at);
  const bool has_root = collective == Collective::broadcast || collective == Collective::reduce ||
                        collective == Collective::gather || collective == Collective::scatter;
  return has_root ? text + " with root " + std::to_string(root) : text;
}

}  // namespace shoal
