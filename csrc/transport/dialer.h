// Connects to other processes, and retries until they answer.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "transport/descriptor.h"
#include "transport/event_loop.h"
#include "transport/handshake.h"

namespace shoal {

// All functions run on the loop's thread.
class Dialer {
 public:
  using Admit = std::function<void(const Purpose&, Descriptor)>;

  // The content of a connection attempt, and the secret that proves it.
  struct Credentials {
    Purpose purpose;
    Secret secret;
  };
  // Asked before each attempt; none: the connection is not wanted any more.
  using Next = std::function<std::optional<Credentials>()>;

  // Why there is no connection to a rank yet.
  struct Trouble {
    std::string text;
    bool was_refused = false;  // it answered, but one of the two ends does not know the secret
  };

  Dialer(EventLoop& loop, Admit admit) : loop_(loop), admit_(std::move(admit)) {}

  // Hands over a connection when there is one.
  void dial(const std::string& address, Next next);

  // Drops attempts for this group; attempts for another group go on.
  void withdraw(uint64_t group);
  void close();

  // The last error of an attempt to connect to the group's `rank`.
  Trouble trouble_with(uint64_t group, int rank) const;

 private:
  struct Call {
    std::string address;
    Next next;
    Purpose purpose = {};
    Descriptor socket = {};
    Handshake handshake = Handshake::dial({}, {});
    double pause;  // seconds before the next attempt
    EventLoop::Timer timer = {};
  };
  using Calls = std::list<Call>;

  void attempt(Calls::iterator call);
  void converse(Calls::iterator call);
  void try_again(Calls::iterator call, const std::string& trouble, bool was_refused);

  EventLoop& loop_;
  const Admit admit_;
  Calls calls_;
  std::map<std::pair<uint64_t, int>, Trouble> troubles_;  // by group and rank
};

}  // namespace shoal
