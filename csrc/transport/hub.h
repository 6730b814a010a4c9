// What all groups of a process share towards other processes: one thread, one listener, one connection with each
// process of another host, one watch of each process of this host.
//
// Ownership: a Hub outlives the groups that use it. What a group leaves here (a member, a party of a contact, a
// watcher) calls back into the group on the loop's thread; the group takes it back by `loop().call`, after which no
// callback of its own runs any more, and only then is destroyed.
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
  // `handshake_limit` is how long, in seconds, a stranger may take to prove that it is none.
  explicit Hub(double handshake_limit = 5);

  // No group uses it any more.
  ~Hub();

  EventLoop& loop() { return loop_; }

  // Listens on `bind_address` (an IPv4 or IPv6 address) and nothing else, on a port that the system chooses, from the
  // first time that a group asks for it on. From any thread.
  // Throws Failure: invalid, if that is no address; system, if it is not this host's.
  Endpoint listen(const std::string& bind_address);

  // How many connections were closed because they did not prove that they belong here.
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
  // dials. The group must have enrolled, and gives the contact up with `withdraw`.
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
    uint64_t last_tried = 0;        // the group in whose name the last attempt was made
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
