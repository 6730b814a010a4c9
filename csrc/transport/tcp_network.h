// The connections of one rank with the ranks of its group on other hosts.
//
// Between any two ranks there is a control connection, made at the start, and one link per channel, made on
// first use. The higher rank dials, the lower one accepts; who needs a link and is the lower one asks for it
// on the control connection. All of it happens in the Watch's thread, and none of it waits there.
#pragma once

#include <array>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/alarm.h"
#include "common/deadline.h"
#include "transport/dialer.h"
#include "transport/handshake.h"
#include "transport/link.h"
#include "transport/listener.h"
#include "transport/tcp_link.h"
#include "transport/watch.h"

namespace shoal {

class TcpNetwork {
 public:
  static constexpr int channels = 2;  // 0: collectives, 1: point to point

  // Listens on `bind_address` (an IPv4 or IPv6 address) and nothing else, on a port that the system chooses.
  // `handshake_limit` is how long, in seconds, a stranger may take to prove that it is none.
  // Throws Failure: invalid, if that is no address; system, if it is not this host's.
  TcpNetwork(int rank, int size, const std::string& bind_address, int streams, const Alarm& alarm,
             Watch& watch, double handshake_limit = 5);

  // Closes everything. No link may be in use, and the Watch has left.
  ~TcpNetwork();

  // Where this rank listens, "address:port" or "[address]:port", for the other ranks' `start`.
  std::string address() const { return listener_.address(); }

  // Makes the control connections; returns when all are there. `addresses` has an entry per rank of the
  // group, of which those of `remote_ranks` are used. Throws Failure: timeout (naming a rank that is
  // missing), refused (it does not know the secret), or what the alarm holds.
  void start(const std::vector<std::string>& addresses, const std::vector<int>& remote_ranks,
             const Secret& secret, Deadline deadline);

  // The links of a channel, each of `streams` connections. Those to ranks that are not remote do not exist.
  Links& channel(int number);

  // Frees whoever waits for a link or polls one; of use after the alarm only. From any thread.
  void interrupt();

  // How many connections were closed because they did not prove that they belong here.
  int refused() const { return listener_.refused(); }

 private:
  class Channel;
  enum class Contact { none, missing, made };  // whether a rank has a control connection with this one

  void admit(const Purpose& purpose, Descriptor socket);
  void admit_control(int peer, Descriptor socket);
  template <class Ready>
  bool await(const Ready& ready, std::unique_lock<std::mutex>& lock, Deadline deadline);
  [[noreturn]] void fail_to_reach(int peer);

  const int rank_, streams_;
  const Alarm& alarm_;
  Watch& watch_;
  Listener listener_;
  Dialer dialer_;
  std::vector<std::string> addresses_;  // by rank

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Contact> contacts_;  // by rank
  std::array<std::unique_ptr<Channel>, channels> channels_;
};

}  // namespace shoal
