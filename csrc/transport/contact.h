// The control connection between this process and one on another host, for all groups that both are in.
//
// One connection serves all of them: each message names its group. A group of this process *joins* the contact, which
// tells the other process so; once the other has joined for the same group too, both know that the connection stays: a
// process ends it only when none of its groups needs it any more. So a connection that ends before the other process
// has joined is made again, and one that ends later means the loss of the other process, for each group that did not
// receive its goodbye.
//
// All functions run on the loop's thread.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>

#include "transport/control_connection.h"
#include "transport/descriptor.h"
#include "transport/event_loop.h"

namespace shoal {

class Contact {
 public:
  using Time = EventLoop::Clock::time_point;

  // A group that joined. A message `join` is the other process's joining for it.
  struct Party {
    std::function<void(const ControlMessage&)> hear;
    std::function<void()> on_loss;  // the connection ended after the other had joined
    bool has_other = false;         // the other process has joined
  };

  // `on_end` is called when the connection has ended, after the parties were told.
  Contact(EventLoop& loop, std::function<void()> on_end) : loop_(loop), on_end_(std::move(on_end)) {}
  ~Contact() { finish(); }
  Contact(const Contact&) = delete;

  // Takes a new connection with the other process, which has given up the one before.
  void connect(Descriptor socket);
  bool is_connected() const { return connection_.has_value(); }

  void join(uint64_t group, Party party);
  void leave(uint64_t group) { parties_.erase(group); }

  // Whether a group waits for the other process to join.
  bool is_awaited() const;

  // Does nothing if there is no connection.
  void send(const ControlMessage& message);

  // Gives a sign of life, unless the last one was given less than `period` seconds ago.
  void beat(double period, Time now);

  // When the last message arrived.
  Time last_sign() const { return last_sign_; }
  void count_afresh(Time now) { last_sign_ = now; }

  // Ends the connection so that sent messages still arrive.
  void finish();

 private:
  void read();
  void take(const ControlMessage& message);
  void end();

  EventLoop& loop_;
  const std::function<void()> on_end_;
  std::optional<ControlConnection> connection_;
  std::map<uint64_t, Party> parties_;
  // Messages for groups that this process has not joined yet; the first of each says that the other process joined.
  std::deque<ControlMessage> early_;
  Time last_sign_ = EventLoop::Clock::now(), last_beat_{};
};

}  // namespace shoal
