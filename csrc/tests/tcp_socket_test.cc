// Sockets between hosts: which addresses they take, and how an idle connection is kept alive.
#include "transport/tcp_socket.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <utility>

#include "tests/check.h"
#include "tests/network_ranks.h"

namespace {

using namespace shoal;
using namespace shoal::testing;

void an_address_is_a_number_of_this_host() {
  CHECK_THROWS(listen_on("localhost"), Code::invalid);
  CHECK_THROWS(listen_on("192.0.2.1"), Code::system);  // reserved for documentation: no host has it
  CHECK_THROWS(begin_to_connect("127.0.0.1"), Code::invalid);
  CHECK_THROWS(begin_to_connect("127.0.0.1:many"), Code::invalid);
}

int option_of(const Descriptor& socket, int level, int option) {
  int value = -1;
  socklen_t size = sizeof value;
  CHECK_EQUAL(getsockopt(socket.number(), level, option, &value, &size), 0);
  return value;
}

void idle_connections_are_kept_alive_from_both_ends() {
  const Descriptor listening = listen_on("127.0.0.1");
  const Descriptor dialed = begin_to_connect(address_of(listening));
  Descriptor accepted;
  CHECK(comes_true([&] { return static_cast<bool>(accepted = accept_from(listening)); }));
  for (const Descriptor* end : {&dialed, &std::as_const(accepted)}) {
    CHECK(option_of(*end, SOL_SOCKET, SO_KEEPALIVE) != 0);
    CHECK_EQUAL(option_of(*end, IPPROTO_TCP, TCP_KEEPIDLE), KeepAlive::idle_seconds);
    CHECK_EQUAL(option_of(*end, IPPROTO_TCP, TCP_KEEPINTVL), KeepAlive::interval_seconds);
    CHECK_EQUAL(option_of(*end, IPPROTO_TCP, TCP_KEEPCNT), KeepAlive::probes);
    CHECK(option_of(*end, IPPROTO_TCP, TCP_NODELAY) != 0);
  }
}

}  // namespace

int main() {
  an_address_is_a_number_of_this_host();
  idle_connections_are_kept_alive_from_both_ends();
  return report();
}
