// Where other ranks call. Each connection has to prove that it belongs to the group, and is then handed over.
#pragma once

#include <atomic>
#include <functional>
#include <list>
#include <string>

#include "transport/descriptor.h"
#include "transport/event_loop.h"
#include "transport/handshake.h"

namespace shoal {

class Listener {
 public:
  using Admit = std::function<void(const Purpose&, Descriptor)>;

  // `limit`: seconds that a connection may take for its handshake.
  Listener(const std::string& bind_address, double limit, EventLoop& loop);

  std::string address() const;

  // Begins to accept, as `rank`. On the loop's thread, like `close`; so is `admit` called.
  void open(const Secret& secret, int rank, Admit admit);
  void close();

  int refused() const { return refused_.load(std::memory_order_relaxed); }

 private:
  // Someone who connected, and has proved nothing yet.
  struct Guest {
    Descriptor socket;
    Handshake handshake;
    EventLoop::Timer limit{};
  };
  using Guests = std::list<Guest>;

  void accept_all();
  void pause();
  void welcome(Descriptor socket);
  void converse(Guests::iterator guest);
  Descriptor part_with(Guests::iterator guest);
  void refuse(Guests::iterator guest);

  EventLoop& loop_;
  Descriptor socket_;
  const double limit_;
  Secret secret_{};
  int rank_ = -1;
  Admit admit_;
  Guests guests_;  // the oldest first
  EventLoop::Timer pause_{};
  std::atomic<int> refused_{0};
};

}  // namespace shoal
