// The hash and the HMAC against the vectors that were published with them.
#include "transport/sha256.h"

#include <algorithm>
#include <string>

#include "tests/check.h"

namespace {

using shoal::Sha256;

std::string hexadecimal(const Sha256::Digest& digest) {
  static const char digits[] = "0123456789abcdef";
  std::string text;
  for (uint8_t byte : digest) text += {digits[byte >> 4], digits[byte & 15]};
  return text;
}

std::string sha256_of(const std::string& message, size_t part) {
  Sha256 hash;
  for (size_t at = 0; at < message.size(); at += part) {
    hash.update(message.data() + at, std::min(part, message.size() - at));
  }
  return hexadecimal(hash.finish());
}

std::string hmac_of(const std::string& key, const std::string& message) {
  return hexadecimal(shoal::hmac_sha256(key.data(), key.size(), message));
}

// FIPS 180-4's examples, as NIST publishes them.
void hashes_the_published_messages() {
  const std::string empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
  const std::string abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
  const std::string two_blocks = "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1";
  const std::string four_blocks = "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1";
  const std::string million = "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0";
  const std::string long_message =
      "abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqr"
      "lmnopqrsmnopqrstnopqrstu";
  for (size_t part : {1, 3, 64, 1000}) {
    CHECK_EQUAL(sha256_of("", part), empty);
    CHECK_EQUAL(sha256_of("abc", part), abc);
    CHECK_EQUAL(sha256_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", part), two_blocks);
    CHECK_EQUAL(sha256_of(long_message, part), four_blocks);
    CHECK_EQUAL(sha256_of(std::string(1000000, 'a'), part), million);
  }
}

// RFC 4231, cases 1, 2, 3, 4 and 6.
void authenticates_the_published_messages() {
  CHECK_EQUAL(hmac_of(std::string(20, '\x0b'), "Hi There"),
              "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK_EQUAL(hmac_of("Jefe", "what do ya want for nothing?"),
              "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK_EQUAL(hmac_of(std::string(20, '\xaa'), std::string(50, '\xdd')),
              "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  std::string counting;
  for (char byte = 1; byte <= 25; ++byte) counting += byte;
  CHECK_EQUAL(hmac_of(counting, std::string(50, '\xcd')),
              "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
  CHECK_EQUAL(hmac_of(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First"),
              "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

void compares_every_byte() {
  const std::string text = "0123456789abcdef";
  CHECK(shoal::equal_in_constant_time(text, text));
  CHECK(!shoal::equal_in_constant_time(text, text.substr(1)));
  for (size_t at = 0; at < text.size(); ++at) {
    std::string other = text;
    other[at] ^= 0x40;
    CHECK(!shoal::equal_in_constant_time(text, other));
  }
}

}  // namespace

int main() {
  hashes_the_published_messages();
  authenticates_the_published_messages();
  compares_every_byte();
  return report();
}
