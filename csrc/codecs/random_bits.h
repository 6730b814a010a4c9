// Random bits without a state, as in shoal/collectives/codecs/with_torch.py, which says where they are from.
#pragma once

#include "codecs/lanes.h"

namespace shoal {
namespace {

struct RandomKeys {
  uint32_t first, second;
};

inline RandomKeys keys_of(uint64_t seed) {
  uint64_t mixed = seed + 0x9E3779B97F4A7C15;
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9;
  mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB;
  mixed ^= mixed >> 31;
  return {static_cast<uint32_t>(mixed), static_cast<uint32_t>(mixed >> 32)};
}

constexpr uint32_t index_multiplier = 0x9E3779B1;

// Of one index or of a vector of them; `spread` is index * index_multiplier + the first key.
template <typename T>
inline T mixed_bits(T spread, uint32_t second_key) {
  spread ^= spread >> 16;
  spread = (spread * 0x7FEB352Du) ^ second_key;
  spread ^= spread >> 15;
  return spread * 0x846CA68Bu;
}

// The bits of the indices from `begin` on, a vector at a time.
template <class U>
class RandomVectors {
 public:
  RandomVectors(RandomKeys keys, size_t begin)
      : second_key_(keys.second),
        spread_((lane_numbers<U>() + static_cast<uint32_t>(begin)) * index_multiplier + keys.first) {}

  typename U::Bits next() {
    const typename U::Bits bits = mixed_bits(spread_, second_key_);
    spread_ += static_cast<uint32_t>(U::lanes) * index_multiplier;
    return bits;
  }

 private:
  const uint32_t second_key_;
  typename U::Bits spread_;
};

inline uint32_t random_bits(RandomKeys keys, size_t index) {
  return mixed_bits(static_cast<uint32_t>(index) * index_multiplier + keys.first, keys.second);
}

// From 0 to 1, without 1. Conversion from signed numbers is quicker, and 24 bits have no sign.
template <class U>
inline typename U::Float uniform(typename U::Bits bits) {
  return __builtin_convertvector(bits_as<typename U::Int>(bits >> 8), typename U::Float) * 0x1p-24f;
}

}  // namespace
}  // namespace shoal
