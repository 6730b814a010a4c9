#include "transport/control_connection.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace shoal {

namespace {

struct Header {
  uint8_t kind;
  uint8_t code;
  uint16_t text_bytes;
  int32_t number;
  uint64_t group;
};
static_assert(sizeof(Header) == 16);

constexpr size_t longest_text = 1024;

}  // namespace

void ControlConnection::send(const ControlMessage& message) {
  const size_t text_bytes = std::min(message.text.size(), longest_text);
  const Header header{static_cast<uint8_t>(message.kind), static_cast<uint8_t>(message.code),
                      static_cast<uint16_t>(text_bytes), message.number, message.group};
  // If a peer does not read for hours, only as many signs of life are sent as fit; the others are not needed.
  if (message.kind != ControlMessage::Kind::heartbeat || outgoing_.empty()) {
    outgoing_.append(reinterpret_cast<const char*>(&header), sizeof header);
    outgoing_.append(message.text, 0, text_bytes);
  }
  const ssize_t sent =
      ::send(socket_.number(), outgoing_.data(), outgoing_.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent > 0) outgoing_.erase(0, static_cast<size_t>(sent));
}

bool ControlConnection::receive(std::vector<ControlMessage>& messages) {
  std::array<char, 4096> buffer;
  for (;;) {
    const ssize_t count = recv(socket_.number(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (count > 0) {
      incoming_.append(buffer.data(), static_cast<size_t>(count));
      if (!parse(messages)) return false;
    } else if (count < 0 && errno == EINTR) {
      continue;
    } else {
      return count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
    }
  }
}

void ControlConnection::finish() {
  shutdown(socket_.number(), SHUT_WR);
  // If a socket is closed with unread data, the system resets the connection and drops sent data.
  std::array<char, 4096> buffer;
  while (recv(socket_.number(), buffer.data(), buffer.size(), MSG_DONTWAIT) > 0) continue;
}

bool ControlConnection::parse(std::vector<ControlMessage>& messages) {
  for (;;) {
    Header header;
    if (incoming_.size() < sizeof header) return true;
    std::memcpy(&header, incoming_.data(), sizeof header);
    if (header.kind > static_cast<uint8_t>(ControlMessage::Kind::request)) return false;
    if (header.code > static_cast<uint8_t>(Code::refused) || header.text_bytes > longest_text) return false;
    if (incoming_.size() < sizeof header + header.text_bytes) return true;
    messages.push_back({static_cast<ControlMessage::Kind>(header.kind), static_cast<Code>(header.code),
                        header.number, incoming_.substr(sizeof header, header.text_bytes), header.group});
    incoming_.erase(0, sizeof header + header.text_bytes);
  }
}

}  // namespace shoal
