// Calls other ranks, and goes on trying until they answer.
#pragma once

#include <functional>
#include <list>
#include <map>
#include <string>

#include "transport/descriptor.h"
#include "transport/event_loop.h"
#include "transport/handshake.h"

namespace shoal {

// All of it on the loop's thread.
class Dialer {
 public:
  using Admit = std::function<void(const Purpose&, Descriptor)>;

  // Why no connection to a rank came about yet.
  struct Trouble {
    std::string text;
    bool was_refused = false;  // it answered, but one of the two does not know the secret
  };

  explicit Dialer(EventLoop& loop) : loop_(loop) {}

  void open(const Secret& secret, Admit admit);
  void close();

  // Hands over a connection when there is one.
  void dial(const std::string& address, const Purpose& purpose);

  // The last that went wrong in calling `rank`.
  Trouble trouble_with(int rank) const;

 private:
  struct Call {
    std::string address;
    Purpose purpose;
    Descriptor socket;
    Handshake handshake;
    double pause;  // seconds before the next attempt
    EventLoop::Timer timer{};
  };
  using Calls = std::list<Call>;

  void attempt(Calls::iterator call);
  void converse(Calls::iterator call);
  void try_again(Calls::iterator call, const std::string& trouble, bool was_refused);

  EventLoop& loop_;
  Secret secret_{};
  Admit admit_;
  Calls calls_;
  std::map<int, Trouble> troubles_;
};

}  // namespace shoal
