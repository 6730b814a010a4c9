// SHA-256 (FIPS 180-4), and HMAC with it (RFC 2104).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace shoal {

class Sha256 {
 public:
  static constexpr size_t block_bytes = 64;
  using Digest = std::array<uint8_t, 32>;

  void update(const void* data, size_t bytes);

  // The digest of all added bytes; the object cannot be used after that.
  Digest finish();

 private:
  void absorb_block();

  std::array<uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, block_bytes> block_{};
  size_t filled_ = 0;
  uint64_t total_ = 0;
};

Sha256::Digest hmac_sha256(const void* key, size_t key_bytes, std::string_view message);

// Whether two texts are equal, in a time that does not tell where they differ.
bool equal_in_constant_time(std::string_view a, std::string_view b);

}  // namespace shoal
