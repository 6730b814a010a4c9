// The bytes of a stranger, who connects to a listener or answers a dialer, against both ends of the handshake.
//
// The first byte chooses the end, and how the rest is cut into messages. A stranger who does not know the secret must
// never be let in: a proof that is right by chance is not expected in the life of a fuzzer.
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "transport/handshake.h"

using namespace shoal;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const bool accepts = data[0] & 1, knows_group = data[0] & 2;
  const size_t piece = 1 + (data[0] >> 2);
  Secret secret{};
  secret[0] = 7;
  Handshake handshake = accepts ? Handshake::accept([&](uint64_t) {
    return knows_group ? std::optional<Membership>({secret, 1}) : std::nullopt;
  })
                                : Handshake::dial(secret, Purpose{.group = 5, .from = 0, .to = 1});
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) std::abort();
  Handshake::Outcome outcome = handshake.converse(ends[0]);
  for (size_t at = 1; at < size && outcome.progress == Handshake::Progress::underway; at += piece) {
    if (send(ends[1], data + at, std::min(piece, size - at), MSG_DONTWAIT | MSG_NOSIGNAL) < 0) break;
    outcome = handshake.converse(ends[0]);
  }
  close(ends[1]);
  if (outcome.progress == Handshake::Progress::underway) outcome = handshake.converse(ends[0]);
  if (outcome.progress == Handshake::Progress::done) std::abort();
  close(ends[0]);
  return 0;
}
