// Codecs: all vector units give the same bytes, nothing is read or written outside of the buffers, and payloads that are
// not ones are refused. tests/collectives/test_codecs.py compares with torch.
#include "codecs/codec.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "common/reduce.h"

using namespace shoal;

namespace {

const Codec codecs[] = {
    {CodecKind::int8, 0, 5},       {CodecKind::int4, 0, 5},        {CodecKind::fp8, 0, 5},
    {CodecKind::sign, 0, 5},       {CodecKind::topk, 64, 5},       {CodecKind::topk, 3, 5},
    {CodecKind::topk_2bit, 16, 5}, {CodecKind::threshold, 2, 5},   {CodecKind::random, 64, 5},
    {CodecKind::random, 4096, 5},  {CodecKind::topk_2bit, 2, 5},
};

// Exactly as many elements as are used, so that the address sanitizer sees what goes beyond.
std::vector<float> random_values(size_t count, float not_finite) {
  std::mt19937 generator(7);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(generator) * std::exp(normal(generator));
  if (count > 10 && !std::isfinite(not_finite)) values[count / 2] = not_finite;
  return values;
}

struct Coded {
  std::vector<std::byte> payload;
  std::vector<uint32_t> residual, decoded, added;
};

std::vector<uint32_t> bits_of(const std::vector<float>& values) {
  std::vector<uint32_t> bits;
  // Which NaN comes of arithmetic with one is the processor's affair.
  for (const float value : values) bits.push_back(std::isnan(value) ? 0x7fc00000 : std::bit_cast<uint32_t>(value));
  return bits;
}

Coded code(const Codec& codec, const std::vector<float>& values) {
  const size_t count = values.size();
  Coded coded{std::vector<std::byte>(payload_bytes(codec, count)), {}, {}, {}};
  std::vector<float> residual(count), decoded(count, 3.0f), added(count, 2.0f);
  coded.payload.resize(
      encode(codec, values.data(), count, coded.payload.data(), coded.payload.size(), residual.data()));
  coded.payload.shrink_to_fit();
  decode(codec, coded.payload.data(), coded.payload.size(), decoded.data(), count);
  decode_add(codec, coded.payload.data(), coded.payload.size(), added.data(), count, -0.3f);
  std::vector<float> rest(count);
  for (size_t at = 0; at < count; ++at) rest[at] = values[at] - decoded[at];
  CHECK(bits_of(rest) == bits_of(residual));
  coded.residual = bits_of(residual);
  coded.decoded = bits_of(decoded);
  coded.added = bits_of(added);
  return coded;
}

void all_units_give_the_same_bytes() {
  const std::string widest = vector_unit();
  for (const Codec& codec : codecs) {
    for (const size_t count : {0, 1, 7, 100, 1023, 1024, 1025, 4096, 4097, 9001, 1 << 20}) {
      for (const float special : {0.0f, std::numeric_limits<float>::infinity(), std::nanf(""),
                                  std::bit_cast<float>(0xffffffff)}) {
        const std::vector<float> values = random_values(count, special);
        force_vector_unit("portable");
        const Coded wanted = code(codec, values);
        for (const char* unit : {"avx2", "avx512", "neon"}) {
          if (!force_vector_unit(unit)) continue;
          const Coded found = code(codec, values);
          CHECK(found.payload == wanted.payload);
          CHECK(found.residual == wanted.residual);
          CHECK(found.decoded == wanted.decoded);
          CHECK(found.added == wanted.added);
        }
      }
    }
  }
  force_vector_unit(widest.c_str());
}

void the_residual_may_replace_the_values() {
  for (const Codec& codec : codecs) {
    const std::vector<float> values = random_values(10'000, 0.0f);
    std::vector<float> in_place = values;
    std::vector<std::byte> payload(payload_bytes(codec, values.size()));
    payload.resize(encode(codec, in_place.data(), in_place.size(), payload.data(), payload.size(), in_place.data()));
    const Coded wanted = code(codec, values);
    CHECK(payload == wanted.payload);
    CHECK(bits_of(in_place) == wanted.residual);
  }
}

// Large vectors that lie at whole cache lines are written past the caches.
void where_a_vector_lies_changes_nothing() {
  const size_t count = (1 << 20) + 4096 + 37;
  const std::vector<float> values = random_values(count, 0.0f);
  std::vector<float> memory[2] = {std::vector<float>(count + 32), std::vector<float>(count + 32)};
  for (const Codec& codec : codecs) {
    const Coded wanted = code(codec, values);
    std::vector<std::byte> payload(wanted.payload.size() + payload_bytes(codec, count));
    for (const size_t offset : {0, 1}) {
      float* places[2];
      for (size_t which = 0; which < 2; ++which) {
        float* const begin = memory[which].data();
        places[which] = begin + (64 - reinterpret_cast<uintptr_t>(begin) % 64) / sizeof(float) + offset;
      }
      const auto [residual, decoded] = places;
      encode(codec, values.data(), count, payload.data(), payload.size(), residual);
      decode(codec, wanted.payload.data(), wanted.payload.size(), decoded, count);
      CHECK(bits_of({residual, residual + count}) == wanted.residual);
      CHECK(bits_of({decoded, decoded + count}) == wanted.decoded);
    }
  }
}

void what_is_no_payload_is_refused() {
  std::mt19937 generator(3);
  const size_t count = 5000;
  const std::vector<float> values = random_values(count, 0.0f);
  for (const Codec& codec : codecs) {
    std::vector<std::byte> payload(payload_bytes(codec, count));
    std::vector<float> out(count);
    CHECK_THROWS(encode(codec, values.data(), count, payload.data(), payload.size() - 1, nullptr), Code::invalid);
    payload.resize(encode(codec, values.data(), count, payload.data(), payload.size(), nullptr));
    CHECK_THROWS(decode(codec, payload.data(), payload.size() - 1, out.data(), count), Code::invalid);
    // Any bytes are decoded or refused, within the buffers.
    for (int attempt = 0; attempt < 100; ++attempt) {
      for (std::byte& byte : payload) byte = static_cast<std::byte>(generator());
      try {
        decode(codec, payload.data(), payload.size(), out.data(), count);
      } catch (const Failure& failure) {
        CHECK_EQUAL(failure.code, Code::invalid);
      }
    }
  }
  float value = 1;
  std::byte payload[8];
  CHECK_THROWS(encode({CodecKind::topk, 0, 0}, &value, 1, payload, 8, nullptr), Code::invalid);
  CHECK_THROWS(encode({CodecKind::random, 4097, 0}, &value, 1, payload, 8, nullptr), Code::invalid);
  CHECK_THROWS(encode({static_cast<CodecKind>(8), 2, 0}, &value, 1, payload, 8, nullptr), Code::invalid);
  CHECK_THROWS(encode({static_cast<CodecKind>(-1), 2, 0}, &value, 1, payload, 8, nullptr), Code::invalid);
}

}  // namespace

int main() {
  all_units_give_the_same_bytes();
  the_residual_may_replace_the_values();
  where_a_vector_lies_changes_nothing();
  what_is_no_payload_is_refused();
  return report();
}
