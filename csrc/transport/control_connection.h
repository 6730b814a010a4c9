// What two processes of different hosts tell each other beside the data: that they live, and, for each group that
// both are in, that they have joined it, leave it, or gave it up.
//
// A message is sixteen bytes and, for an alarm, a text.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"
#include "transport/descriptor.h"
#include "transport/not_inherited.h"

namespace shoal {

struct ControlMessage {
  enum class Kind : uint8_t { heartbeat, join, leaving, goodbye, alarm, request };
  Kind kind = Kind::heartbeat;
  Code code = Code::ok;  // of an alarm
  int32_t number = -1;   // of an alarm: the rank that it is about; of a request: which
  std::string text = {};  // of an alarm
  uint64_t group = 0;    // the group's number; a heartbeat is for all groups
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
