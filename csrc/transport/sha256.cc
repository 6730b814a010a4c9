#include "transport/sha256.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace shoal {

namespace {

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr std::array<uint32_t, 64> round_constants{
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t load_big_endian(const uint8_t* bytes) {
  return uint32_t{bytes[0]} << 24 | uint32_t{bytes[1]} << 16 | uint32_t{bytes[2]} << 8 | uint32_t{bytes[3]};
}

}  // namespace

void Sha256::update(const void* data, size_t bytes) {
  const auto* next = static_cast<const uint8_t*>(data);
  total_ += bytes;
  while (bytes > 0) {
    const size_t part = std::min(bytes, block_bytes - filled_);
    std::memcpy(block_.data() + filled_, next, part);
    filled_ += part, next += part, bytes -= part;
    if (filled_ == block_bytes) absorb_block();
  }
}

Sha256::Digest Sha256::finish() {
  // A one bit, zeros, and the length in bits fill the last block.
  const uint64_t bits = total_ * 8;
  const uint8_t one_bit = 0x80, zero = 0;
  update(&one_bit, 1);
  while (filled_ != block_bytes - sizeof bits) update(&zero, 1);
  for (int shift = 56; shift >= 0; shift -= 8) {
    const auto byte = static_cast<uint8_t>(bits >> shift);
    update(&byte, 1);
  }

  Digest digest;
  for (size_t i = 0; i < digest.size(); ++i) {
    digest[i] = static_cast<uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
  }
  return digest;
}

void Sha256::absorb_block() {
  std::array<uint32_t, 64> schedule;
  for (size_t i = 0; i < 16; ++i) schedule[i] = load_big_endian(block_.data() + 4 * i);
  for (size_t i = 16; i < 64; ++i) {
    const uint32_t w15 = schedule[i - 15], w2 = schedule[i - 2];
    const uint32_t sigma0 = std::rotr(w15, 7) ^ std::rotr(w15, 18) ^ (w15 >> 3);
    const uint32_t sigma1 = std::rotr(w2, 17) ^ std::rotr(w2, 19) ^ (w2 >> 10);
    schedule[i] = schedule[i - 16] + sigma0 + schedule[i - 7] + sigma1;
  }

  auto [a, b, c, d, e, f, g, h] = state_;
  for (size_t i = 0; i < 64; ++i) {
    const uint32_t sum1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const uint32_t choice = (e & f) ^ (~e & g);
    const uint32_t temporary1 = h + sum1 + choice + round_constants[i] + schedule[i];
    const uint32_t sum0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const uint32_t majority = (a & b) ^ (a & c) ^ (b & c);
    const uint32_t temporary2 = sum0 + majority;
    h = g, g = f, f = e, e = d + temporary1;
    d = c, c = b, b = a, a = temporary1 + temporary2;
  }

  const std::array<uint32_t, 8> worked{a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < 8; ++i) state_[i] += worked[i];
  filled_ = 0;
}

Sha256::Digest hmac_sha256(const void* key, size_t key_bytes, std::string_view message) {
  std::array<uint8_t, Sha256::block_bytes> padded_key{};
  if (key_bytes > padded_key.size()) {
    Sha256 hash;
    hash.update(key, key_bytes);
    const Sha256::Digest digest = hash.finish();
    std::copy(digest.begin(), digest.end(), padded_key.begin());
  } else if (key_bytes > 0) {
    std::memcpy(padded_key.data(), key, key_bytes);
  }
  std::array<uint8_t, Sha256::block_bytes> inner_pad, outer_pad;
  for (size_t i = 0; i < padded_key.size(); ++i) {
    inner_pad[i] = padded_key[i] ^ 0x36;
    outer_pad[i] = padded_key[i] ^ 0x5c;
  }

  Sha256 inner;
  inner.update(inner_pad.data(), inner_pad.size());
  inner.update(message.data(), message.size());
  const Sha256::Digest inner_digest = inner.finish();
  Sha256 outer;
  outer.update(outer_pad.data(), outer_pad.size());
  outer.update(inner_digest.data(), inner_digest.size());
  return outer.finish();
}

bool equal_in_constant_time(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  volatile uint8_t difference = 0;  // volatile, so that no compiler ends the loop early
  for (size_t i = 0; i < a.size(); ++i) difference = difference | static_cast<uint8_t>(a[i] ^ b[i]);
  return difference == 0;
}

}  // namespace shoal
