// Accepts connections from other processes. Each connection must prove that it belongs to a group, and is then handed
// over.
#pragma once

#include <atomic>
#include <functional>
#include <list>
#include <string>

#include "transport/descriptor.h"
#include "transport/event_loop.h"
#include "transport/handshake.h"

namespace shoal {

// All functions run on the loop's thread, except the constructor, `address` and `refused`.
class Listener {
 public:
  using Admit = std::function<void(const Purpose&, Descriptor)>;

  // `limit`: seconds that a connection may take for its handshake.
  Listener(const std::string& bind_address, double limit, EventLoop& loop);

  std::string address() const;

  // Begins to accept. `find` gives this process's memberships; `admit` takes connections that belong to one.
  void open(Handshake::Find find, Admit admit);
  void close();

  // Continues with connections for groups that this process had not joined.
  void look_again();

  int refused() const { return refused_.load(std::memory_order_relaxed); }

 private:
  // A connection without a proof yet.
  struct Guest {
    Descriptor socket;
    Handshake handshake;
    EventLoop::Clock::time_point since;
    EventLoop::Timer limit{};
    bool is_parked = false;
  };
  using Guests = std::list<Guest>;

  void accept_all();
  bool make_room();
  void pause(double seconds);
  void welcome(Descriptor socket);
  void converse(Guests::iterator guest);
  Descriptor part_with(Guests::iterator guest);
  void refuse(Guests::iterator guest);

  EventLoop& loop_;
  Descriptor socket_;
  const double limit_;
  Handshake::Find find_;
  Admit admit_;
  Guests guests_;  // the oldest first
  EventLoop::Timer pause_{};
  std::atomic<int> refused_{0};
};

}  // namespace shoal
