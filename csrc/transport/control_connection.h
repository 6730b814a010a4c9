// What two ranks of different hosts tell each other beside the data: that they live, leave, or gave up.
//
// A message is eight bytes and, for an alarm, a text.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/error.h"
#include "transport/descriptor.h"
#include "transport/not_inherited.h"

namespace shoal {

struct ControlMessage {
  enum class Kind : uint8_t { heartbeat, goodbye, alarm, request };
  Kind kind = Kind::heartbeat;
  Code code = Code::ok;  // of an alarm
  int32_t number = -1;   // of an alarm: the rank that it is about; of a request: which
  std::string text;      // of an alarm
};

class ControlConnection {
 public:
  explicit ControlConnection(Descriptor socket) : socket_(std::move(socket)), guard_(socket_.number()) {}

  int descriptor() const { return socket_.number(); }

  // Never waits: what finds no room is kept for the next call. That the peer is gone shows in `receive`.
  void send(const ControlMessage& message);

  // Appends what has come. False: the connection has ended, or what came makes no sense.
  bool receive(std::vector<ControlMessage>& messages);

  // Ends it in a way that lets what was sent arrive.
  void finish();

 private:
  bool parse(std::vector<ControlMessage>& messages);

  Descriptor socket_;
  NotInherited guard_;
  std::string outgoing_, incoming_;
};

}  // namespace shoal
