#include "transport/tcp_socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <fstream>
#include <memory>

#include "common/error.h"

namespace shoal {

namespace {

constexpr int backlog = 4096;

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

Addresses parse(const std::string& address, const std::string& port) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(address.c_str(), port.c_str(), &hints, &found) != 0) {
    throw Failure(Code::invalid, -1, "'" + address + "' is no IP address, or '" + port + "' no port");
  }
  return {found, &freeaddrinfo};
}

// The largest buffer that the system grants on demand.
int largest_buffer(const std::string& setting) {
  int bytes = 0;
  std::ifstream("/proc/sys/net/core/" + setting) >> bytes;
  return bytes;
}

void set(const Descriptor& socket, int level, int option, int value) {
  setsockopt(socket.number(), level, option, &value, sizeof value);  // without it, it is slower, not wrong
}

// Sets the options of both ends of a connection.
void prepare(const Descriptor& socket) {
  // Nagle's algorithm would hold small messages back.
  set(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  set(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(socket, IPPROTO_TCP, TCP_KEEPIDLE, KeepAlive::idle_seconds);
  set(socket, IPPROTO_TCP, TCP_KEEPINTVL, KeepAlive::interval_seconds);
  set(socket, IPPROTO_TCP, TCP_KEEPCNT, KeepAlive::probes);
}

Descriptor make_socket(const addrinfo& address) {
  Descriptor socket(::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket) throw system_failure("socket", errno);
  prepare(socket);
  // A buffer that is set is no longer grown by the system, so it must be larger than the system's own choice. It sets
  // the window that is agreed during connection, and accepted sockets inherit it from a listening socket.
  constexpr int wanted = 4 * 1024 * 1024;
  if (largest_buffer("wmem_max") >= wanted) set(socket, SOL_SOCKET, SO_SNDBUF, wanted);
  if (largest_buffer("rmem_max") >= wanted) set(socket, SOL_SOCKET, SO_RCVBUF, wanted);
  return socket;
}

}  // namespace

Descriptor listen_on(const std::string& address, const std::string& port) {
  const Addresses parsed = parse(address, port);
  Descriptor socket = make_socket(*parsed);
  if (port != "0") set(socket, SOL_SOCKET, SO_REUSEADDR, 1);
  if (bind(socket.number(), parsed->ai_addr, parsed->ai_addrlen) != 0) {
    throw system_failure("cannot listen on " + address + (port == "0" ? "" : " port " + port), errno);
  }
  if (listen(socket.number(), backlog) != 0) throw system_failure("listen", errno);
  return socket;
}

std::string address_of(const Descriptor& socket) {
  sockaddr_storage storage{};
  socklen_t size = sizeof storage;
  auto* address = reinterpret_cast<sockaddr*>(&storage);
  char host[NI_MAXHOST], port[NI_MAXSERV];
  if (getsockname(socket.number(), address, &size) != 0) throw system_failure("getsockname", errno);
  constexpr int numeric = NI_NUMERICHOST | NI_NUMERICSERV;
  if (getnameinfo(address, size, host, sizeof host, port, sizeof port, numeric) != 0) {
    throw Failure(Code::system, -1, "a socket's address has no text form");
  }
  std::string text = host;
  if (address->sa_family == AF_INET6) text = '[' + text + ']';
  return text + ':' + port;
}

std::pair<std::string, std::string> split_address(const std::string& address_and_port) {
  const size_t colon = address_and_port.rfind(':');
  if (colon == std::string::npos) {
    throw Failure(Code::invalid, -1, "'" + address_and_port + "' is no address with a port");
  }
  std::string address = address_and_port.substr(0, colon);
  if (address.size() > 2 && address.front() == '[' && address.back() == ']') {
    address = address.substr(1, address.size() - 2);
  }
  return {address, address_and_port.substr(colon + 1)};
}

Descriptor begin_to_connect(const std::string& address_and_port) {
  const auto [address, port] = split_address(address_and_port);
  const Addresses parsed = parse(address, port);
  Descriptor socket = make_socket(*parsed);
  if (connect(socket.number(), parsed->ai_addr, parsed->ai_addrlen) != 0 && errno != EINPROGRESS) {
    throw system_failure("cannot connect to " + address_and_port, errno);
  }
  return socket;
}

Descriptor accept_from(const Descriptor& listening) {
  Descriptor socket(accept4(listening.number(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (socket) prepare(socket);
  return socket;
}

}  // namespace shoal
