// The messages between two processes of different hosts beside the data: signs of life, and, for each group that both
// are in, that they joined it, leave it, or gave it up.
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
  int32_t number = -1;   // of an alarm: the rank that it is about; of a request: its number
  std::string text = {};  // of an alarm
  uint64_t group = 0;    // the group's number; a heartbeat is for all groups
};

class ControlConnection {
 public:
  explicit ControlConnection(Descriptor socket) : socket_(std::move(socket)), guard_(socket_.number()) {}

  int descriptor() const { return socket_.number(); }

  // Never waits: data without room is kept for the next call. `receive` shows when the peer is gone.
  void send(const ControlMessage& message);

  // Appends the messages that have arrived. False: the connection has ended, or its data is not valid.
  bool receive(std::vector<ControlMessage>& messages);

  // Ends the connection so that sent data still arrives.
  void finish();

 private:
  bool parse(std::vector<ControlMessage>& messages);

  Descriptor socket_;
  NotInherited guard_;
  std::string outgoing_, incoming_;
};

}  // namespace shoal
