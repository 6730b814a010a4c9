// The connections of one rank with the ranks of its group on other hosts.
//
// Between the processes of any two ranks there is a Contact, which all their groups share, and between the ranks one
// link per channel, made on first use. For a link the higher rank dials, the lower one accepts; if the lower rank needs
// a link, it asks for it through the contact. All of this runs on the Hub's thread, without waits.
#pragma once

#include <array>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/alarm.h"
#include "common/deadline.h"
#include "transport/handshake.h"
#include "transport/hub.h"
#include "transport/link.h"
#include "transport/tcp_link.h"
#include "transport/watch.h"

namespace shoal {

class TcpNetwork {
 public:
  static constexpr int channels = 2;  // 0: collectives, 1: point to point

  // Listens on `bind_address` through the Hub, and throws the same failures.
  TcpNetwork(int rank, int size, const std::string& bind_address, int streams, const Alarm& alarm,
             Watch& watch, Hub& hub);

  // Closes everything. No link may be in use, and the Watch has left.
  ~TcpNetwork();

  // Where this rank listens, for the other ranks' `start`.
  const Endpoint& endpoint() const { return endpoint_; }

  // Joins the contacts with the others; returns when all have joined too. `endpoints` has an entry per rank of the
  // group, of which those of `remote_ranks` are used. Throws Failure: timeout (naming a missing rank), refused (a rank
  // does not know the secret), or the alarm's failure.
  void start(const std::vector<Endpoint>& endpoints, const std::vector<int>& remote_ranks, const Secret& secret,
             Deadline deadline);

  // The links of a channel, each of `streams` connections. Those to ranks that are not remote do not exist.
  Links& channel(int number);

  // Ends waits for links and polls of links; call it only after the alarm. From any thread.
  void interrupt();

 private:
  class Channel;
  enum class Standing { local, missing, joined };  // of a rank, in this group

  void admit(const Purpose& purpose, Descriptor socket);
  void note_join(int peer);
  template <class Ready>
  bool await(const Ready& ready, std::unique_lock<std::mutex>& lock, Deadline deadline);
  [[noreturn]] void fail_to_reach(int peer);

  const int rank_, streams_;
  const Alarm& alarm_;
  Watch& watch_;
  Hub& hub_;
  const Endpoint endpoint_;
  uint64_t group_ = 0;               // its number, from `start` on
  bool is_enrolled_ = false;         // of the loop's thread
  std::vector<Endpoint> endpoints_;  // by rank

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Standing> standings_;  // by rank
  std::array<std::unique_ptr<Channel>, channels> channels_;
};

}  // namespace shoal
