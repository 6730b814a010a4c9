// TCP sockets that do not block, and their addresses: "192.0.2.1:4000", or "[2001:db8::1]:4000".
//
// Addresses are numeric: callers look names up.
#pragma once

#include <string>
#include <utility>

#include "transport/descriptor.h"

namespace shoal {

// When the system probes the other end of an idle connection. The first probe comes before firewalls and address
// translators forget a connection, which the strictest clouds do after 4 minutes. The connection to a vanished host
// fails after 2 minutes. A stopped process still answers, because its system answers.
//
// TCP_USER_TIMEOUT is left alone. It would also end a connection whose receiver is alive but reads late: a rank that
// computes or saves for longer than the limit. If bytes are in flight, `Watch` notices the end.
struct KeepAlive {
  static constexpr int idle_seconds = 60;
  static constexpr int interval_seconds = 10;
  static constexpr int probes = 6;
};

// A socket that listens on this one address of the host, on a port that the system chooses if none is given.
// Throws Failure: invalid, if it is no address; system, if it is not this host's.
Descriptor listen_on(const std::string& address, const std::string& port = "0");

// The parts of "address:port", without the brackets of IPv6. Throws Failure(Code::invalid).
std::pair<std::string, std::string> split_address(const std::string& address_and_port);

// The address and port that a socket has on this host.
std::string address_of(const Descriptor& socket);

// A socket that is being connected; whether that succeeds shows when it is read. Throws as `listen_on`.
Descriptor begin_to_connect(const std::string& address_and_port);

// The next connection that waits at a listening socket; none, with errno set, if there is none.
Descriptor accept_from(const Descriptor& listening);

}  // namespace shoal
