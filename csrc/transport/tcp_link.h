// A stream of bytes to a rank of another host, over several TCP connections.
//
// One connection is limited by one core's work in the kernel and by one window. So the bytes are distributed in
// stripes: stripe i travels on connection i modulo their number, and the receiver reads them in that order. A message
// shorter than a stripe mostly goes over one connection.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/alarm.h"
#include "transport/descriptor.h"
#include "transport/link.h"

namespace shoal {

class TcpLink final : public Link {
 public:
  static constexpr uint64_t stripe_bytes = 128 * 1024;

  // The sockets are connected and do not block; both ends list them in the same order.
  // `name`: the other end's, for errors; "rank" and the peer's number if it is empty.
  TcpLink(int peer, std::vector<Descriptor> sockets, const Alarm& alarm, std::string name = {});

  size_t send(const void* data, size_t size) override;
  size_t receive(void* data, size_t size) override;
  bool append_poll(std::vector<pollfd>& fds, bool sending, bool receiving) override;

  // Ends polls of the link, and makes every later call fail. From any thread.
  void interrupt();

  uint64_t bytes_sent() const { return sent_; }
  uint64_t bytes_received() const { return received_; }

 private:
  int socket_at(uint64_t position) const {
    return sockets_[position / stripe_bytes % sockets_.size()].number();
  }
  [[noreturn]] void fail(const std::string& what) const;

  const int peer_;
  const std::vector<Descriptor> sockets_;
  const Alarm& alarm_;
  const std::string name_;
  uint64_t sent_ = 0, received_ = 0;
};

}  // namespace shoal
