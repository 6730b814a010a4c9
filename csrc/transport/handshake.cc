#include "transport/handshake.h"

#include <sys/random.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>

#include "common/error.h"
#include "transport/sha256.h"

namespace shoal {

namespace {

constexpr std::string_view protocol = "shoal/2\n";
constexpr size_t random_bytes = 32;
constexpr size_t proof_bytes = 32;
static_assert(sizeof(Purpose) == 24, "it is sent as it lies in memory: every machine here is little-endian");
constexpr size_t hello_bytes = protocol.size() + sizeof(Purpose) + random_bytes;  // and its proof

std::string random_number() {
  std::string number(random_bytes, '\0');
  // So few bytes arrive all together or not at all.
  if (getrandom(number.data(), number.size(), 0) != static_cast<ssize_t>(number.size())) {
    throw system_failure("no random numbers", errno);
  }
  return number;
}

}  // namespace

uint64_t number_of(const Secret& secret) {
  const Sha256::Digest digest = hmac_sha256(secret.data(), secret.size(), "number");
  uint64_t number;
  std::memcpy(&number, digest.data(), sizeof number);
  return number;
}

Handshake Handshake::accept(Find find) {
  Handshake handshake;
  handshake.find_ = std::move(find);
  handshake.challenge_ = random_number();
  handshake.output_ = handshake.challenge_;
  handshake.expect(Stage::hello, hello_bytes + proof_bytes);
  return handshake;
}

Handshake Handshake::dial(const Secret& secret, const Purpose& purpose) {
  Handshake handshake;
  handshake.secret_ = secret;
  handshake.purpose_ = purpose;
  handshake.expect(Stage::challenge, random_bytes);
  return handshake;
}

Handshake::Outcome Handshake::converse(int socket) {
  for (;;) {
    if (!output_.empty()) {
      // A new connection has room for these bytes.
      const std::string output = std::exchange(output_, {});
      const ssize_t sent = send(socket, output.data(), output.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent != static_cast<ssize_t>(output.size())) return {Progress::closed, sent < 0 ? errno : EMSGSIZE};
    }
    if (is_done_) return {Progress::done};
    if (input_.size() < expected_) {
      std::array<char, hello_bytes + proof_bytes> buffer;
      const ssize_t count = recv(socket, buffer.data(), expected_ - input_.size(), MSG_DONTWAIT);
      if (count == 0) return {Progress::closed};
      if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return {Progress::underway};
      if (count < 0) return {Progress::closed, errno};
      input_.append(buffer.data(), static_cast<size_t>(count));
      if (input_.size() < expected_) continue;
    }
    const Progress progress = take_message();
    if (progress != Progress::underway) return {progress};
  }
}

Handshake::Progress Handshake::take_message() {
  switch (stage_) {
    case Stage::challenge:
      take_challenge();
      return Progress::underway;
    case Stage::hello:
      return take_hello();
    default:
      return equal_in_constant_time(input_, proof_of(Role::acceptor)) ? Progress::done : Progress::refused;
  }
}

void Handshake::take_challenge() {
  challenge_ = input_;
  hello_ = protocol;
  hello_.append(reinterpret_cast<const char*>(&purpose_), sizeof purpose_);
  hello_ += random_number();
  output_ = hello_ + proof_of(Role::dialer);
  expect(Stage::welcome, proof_bytes);
}

Handshake::Progress Handshake::take_hello() {
  hello_ = input_.substr(0, hello_bytes);
  if (!hello_.starts_with(protocol)) return Progress::refused;
  Purpose said;
  std::memcpy(&said, hello_.data() + protocol.size(), sizeof said);
  const std::optional<Membership> membership = find_(said.group);
  if (!membership) return Progress::parked;
  secret_ = membership->secret;
  const std::string_view proof = std::string_view(input_).substr(hello_bytes);
  if (!equal_in_constant_time(proof, proof_of(Role::dialer))) return Progress::refused;
  if (said.to != membership->rank) return Progress::refused;
  purpose_ = said;
  output_ = proof_of(Role::acceptor);
  is_done_ = true;
  return Progress::underway;
}

void Handshake::expect(Stage stage, size_t bytes) {
  stage_ = stage;
  expected_ = bytes;
  input_.clear();
}

std::string Handshake::proof_of(Role role) const {
  const std::string_view name = role == Role::dialer ? "dialer" : "acceptor";
  const Sha256::Digest proof =
      hmac_sha256(secret_.data(), secret_.size(), std::string(name) + challenge_ + hello_);
  return {proof.begin(), proof.end()};
}

}  // namespace shoal
