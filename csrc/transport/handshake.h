// How two ends of a new connection prove to each other that they know the group's secret, without sending it.
//
//   acceptor -> dialer   challenge   a random number
//   dialer -> acceptor   hello       the protocol, the purpose, a random number; and the dialer's proof
//   acceptor -> dialer   welcome     the acceptor's proof
//
// `shoal/channel.py` does the same for launchers and parameter servers, with 24 other bytes of purpose.
//
// A proof is HMAC-SHA256, under the secret, of the end's role, both random numbers and the hello's content. So a proof
// is not valid on another connection, for another purpose, or for the end that made it. A stranger learns a random
// number, and makes the acceptor read at most 96 bytes.
//
// One listener serves all groups of a process: the hello names the group, whose secret the proof is under. A hello for
// a group that this process has not joined yet is kept until it joins.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace shoal {

using Secret = std::array<uint8_t, 32>;

// The number by which both ends know a group: it does not reveal the secret from which it is made.
uint64_t number_of(const Secret& secret);

// What a connection is for.
struct Purpose {
  uint64_t group = 0;
  int32_t from = -1;    // the rank that dials
  int32_t to = -1;      // the rank that accepts
  int32_t channel = 0;  // of TcpNetwork, or the control connection's
  int32_t stream = 0;   // which of the channel's connections between the two
};

// What an acceptor must know of a group to let its ranks in.
struct Membership {
  Secret secret;
  int rank;  // this process's
};

class Handshake {
 public:
  enum class Progress {
    underway,
    parked,   // the hello is for a group that this process has not joined: check it again after a join
    done,
    refused,  // the other end has no valid proof
    closed,   // the connection ended
  };
  struct Outcome {
    Progress progress;
    int error = 0;  // of a connection that ended: the errno; 0: the other end closed it
  };

  // The membership in a group, by the group's number; none if this process is not in it.
  using Find = std::function<std::optional<Membership>(uint64_t group)>;

  static Handshake accept(Find find);
  static Handshake dial(const Secret& secret, const Purpose& purpose);

  // Continues as far as the received data allows. Never waits, and never reads beyond the handshake.
  Outcome converse(int socket);

  // Valid when the handshake is done.
  const Purpose& purpose() const { return purpose_; }

 private:
  enum class Role { acceptor, dialer };
  enum class Stage { challenge, hello, welcome };  // the message that this end waits for

  Handshake() = default;
  // These take the message that input_ holds.
  Progress take_message();
  void take_challenge();
  Progress take_hello();
  void expect(Stage stage, size_t bytes);
  std::string proof_of(Role role) const;

  Stage stage_ = Stage::challenge;
  Find find_;  // of the acceptor
  Secret secret_{};
  Purpose purpose_;
  size_t expected_ = 0;
  std::string challenge_, hello_;  // hello_ without its proof
  std::string input_, output_;
  bool is_done_ = false;  // except for sending output_
};

}  // namespace shoal
