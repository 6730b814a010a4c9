// The connections of a process to other processes, shared by all its groups: one thread, one listener, one connection
// with each process of another host, one watch of each process of this host.
//
// Ownership: a Hub outlives the groups that use it. Objects that a group registers here (a member, a party of a
// contact, a watcher) call back into the group on the loop's thread. The group removes them with `loop().call`, after
// which none of its callbacks runs any more, and is destroyed only then.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "transport/contact.h"
#include "transport/dialer.h"
#include "transport/event_loop.h"
#include "transport/handshake.h"
#include "transport/listener.h"
#include "transport/processes.h"

namespace shoal {

// Where a process of another host is reached.
struct Endpoint {
  std::string process;  // a name that no other process has
  std::string address;  // "address:port", where it listens
};

class Hub {
 public:
  // `handshake_limit`: seconds that a new connection may take to prove that it belongs to a group.
  explicit Hub(double handshake_limit = 5);

  // No group uses it any more.
  ~Hub();

  EventLoop& loop() { return loop_; }

  // Listens on `bind_address` (an IPv4 or IPv6 address) and nothing else, on a port that the system chooses, from the
  // first call on. From any thread. Throws Failure: invalid, if that is no address; system, if it is not this host's.
  Endpoint listen(const std::string& bind_address);

  // How many connections were closed because they did not prove that they belong to a group.
  int refused();

  // --- on the loop's thread ---

  Processes& processes() { return processes_; }

  // A group that this process is in; `admit` takes the connections of its links.
  struct Member {
    Secret secret;
    int rank;
    std::function<void(const Purpose&, Descriptor)> admit;
  };
  // Throws Failure(Code::invalid) if a group with this secret is here already.
  void enrol(uint64_t group, Member member);
  void withdraw(uint64_t group);

  // The contact with the process of the group's rank `peer`, which is connected soon: the process of greater name
  // dials. The group must be enrolled, and gives the contact up with `withdraw`.
  std::shared_ptr<Contact> contact(const Endpoint& endpoint, uint64_t group, int peer);

  // Dials a connection of a link, for as long as the group is enrolled.
  void dial(const std::string& address, const Purpose& purpose);

  // Why the group's rank was not reached yet.
  Dialer::Trouble trouble_with(uint64_t group, int rank) const { return dialer_.trouble_with(group, rank); }

 private:
  struct Acquaintance {
    Endpoint endpoint;
    std::shared_ptr<Contact> contact;
    std::map<uint64_t, int> ranks;  // by group that wants the contact: the rank that the process has there
    uint64_t last_tried = 0;        // the group for which the last attempt was made
    bool is_dialed = false;
  };

  std::optional<Membership> find(uint64_t group) const;
  void admit(const Purpose& purpose, Descriptor socket);
  void admit_contact(const Purpose& purpose, Descriptor socket);
  void make_up_for(const std::string& process);
  void dial_contact(const std::string& process);
  std::optional<Dialer::Credentials> next_attempt(const std::string& process);

  const std::string process_;
  const double handshake_limit_;
  EventLoop loop_;
  Processes processes_;
  Dialer dialer_;
  std::map<uint64_t, Member> members_;                 // by group
  std::map<std::string, Acquaintance> acquaintances_;  // by process
  std::map<std::string, std::unique_ptr<Listener>> listeners_;  // by address
};

}  // namespace shoal
