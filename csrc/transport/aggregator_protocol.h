// What the hosts of a group and an aggregator say to each other beside the data.
//
// For each slice of the buffer, a rank of every host opens `streams` connections, and one for signs of life, and sends a
// Greeting on each; the aggregator answers with its magic number. When all hosts are there, the session begins. For each operation every
// host sends a Request and its data; the aggregator sends an Answer and, if that is `ok`, the result.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "common/error.h"
#include "transport/handshake.h"
#include "transport/sha256.h"

namespace shoal {

// The stream of the connection on which the aggregator gives signs of life, four in each heartbeat.
constexpr int pulse_stream = -1;

constexpr std::array<char, 8> aggregator_magic{'s', 'h', 'o', 'a', 'l', '/', 'n', '1'};

// Limits of what a stranger can make an aggregator hold.
constexpr int most_aggregated_hosts = 4096, most_aggregated_streams = 64;

struct Greeting {
  std::array<char, 8> magic = aggregator_magic;
  Sha256::Digest session{};  // made from the group's secret, which it does not reveal
  int32_t slice = 0;         // of the buffer
  int32_t host = 0, hosts = 0;
  int32_t stream = 0, streams = 0;
  int32_t heartbeat = 0;  // of the pulse, in milliseconds
};
static_assert(sizeof(Greeting) == 64, "it is sent as it lies in memory: every machine here is little-endian");

struct Request {
  uint64_t bytes = 0;
  int32_t dtype = 0, reduction = 0, divisor = 1;
  int32_t unused = 0;

  bool operator==(const Request&) const = default;
};
static_assert(sizeof(Request) == 24);

struct Answer {
  int32_t code = 0;   // of Code; not ok: the session ends
  int32_t host = -1;  // whose request is another than that of host 0
};
static_assert(sizeof(Answer) == 8);

inline Sha256::Digest session_of(const Secret& secret) {
  return hmac_sha256(secret.data(), secret.size(), "in-network");
}

}  // namespace shoal
