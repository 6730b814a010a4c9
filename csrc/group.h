// A process group, seen from one of its ranks: its peers on this host and on other hosts, and its operations.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "algorithms/host.h"
#include "algorithms/mailbox.h"
#include "algorithms/over_aggregator.h"
#include "algorithms/over_links.h"
#include "executor.h"
#include "transport/allowed_reads.h"
#include "transport/hub.h"
#include "transport/ring_link.h"
#include "transport/tcp_network.h"
#include "transport/watch.h"

namespace shoal {

struct GroupOptions {
  int rank = 0;
  std::vector<int> hosts;     // for every rank, its host; equal numbers mean the same host
  std::string bind_address;   // where to listen for other hosts
  int streams = 2;            // TCP connections per link
  double heartbeat = 5;       // seconds without a sign of life after which a peer has stopped
  std::string aggregator;     // "address:port" of the aggregator between the hosts; empty: there is none
  std::optional<Secret> aggregator_secret;  // that the aggregator asks for, if it does
};

// How a rank reaches the memory of its peers on the host. The numbers are part of the C interface.
enum class Reach : int {
  copies = 0,  // only in memory that all ranks map: private data is copied there
  reads = 1,   // in their private memory too
  denied = 2,  // not at all: the system's rules keep it from mapping theirs, and the group cannot start
};

class Group {
 public:
  // `hub` belongs to the process: it outlives the group.
  Group(const GroupOptions& options, SharedBuffers& shared_buffers, Hub& hub);
  ~Group();

  // Forming a group: every rank lets its peers on the host read its memory, if it wants direct reads, publishes its
  // introduction, joins with the introductions of all ranks, and starts when all have joined. `start` returns how many
  // ranks of this host take turns on a core: 1 if each has its own core.
  void allow_reads_by(std::vector<pid_t> peers) { allowed_reads_.emplace(std::move(peers)); }
  std::string introduce() const;
  Reach join(const std::vector<std::string>& introductions, const Secret& secret, Deadline deadline);
  int start(bool can_read_peers);

  // Begins an operation. Null if it is done already; otherwise the caller must wait for it.
  std::shared_ptr<Task> call(Operation operation, bool asynchronous);
  // Returns true when the operation is done, and false if `limit` has passed before.
  bool wait(Task& task, const std::optional<Deadline>& limit = {});

  std::shared_ptr<Message> send(int peer, int tag, const void* data, size_t bytes);
  std::shared_ptr<Message> receive(int peer, int tag, void* data, size_t bytes);
  // As above; a message that is not done by its `deadline` ends the group.
  bool wait(Message& message, Deadline deadline, const std::optional<Deadline>& limit = {});

  // Ends all waits, here and on the other ranks; the group cannot be used any more.
  void abort(Code code, int rank, const std::string& text);

  // Throws the reason if the group cannot communicate any more.
  void check() const { alarm_.check(); }

  // Ends all waits on this rank only; no operation may begin any more. Complete sends are still delivered: the
  // destructor waits for that.
  void end();

  // After `end`: returns when no other thread touches the memory of an operation or a message any more. The caller may
  // be inside an operation that a signal interrupted.
  void settle();

  int rank() const { return options_.rank; }
  int size() const { return static_cast<int>(options_.hosts.size()); }

 private:
  class PeerLinks;    // to every rank of the group: through memory, or through the network
  class AcrossLinks;  // to the ranks of the same local index, on every host

  void run(Task& task, bool is_background);
  void run_level_by_level(const Operation& operation);
  void run_in_network(const Operation& operation);
  void meet_aggregator(const Secret& secret);
  void watch_neighbours(const std::vector<Introduction>& introductions);
  void wake_sleepers();
  const std::vector<int>& local_ranks() const { return hierarchy_.ranks_on(hierarchy_.host_of(options_.rank)); }
  int index() const { return hierarchy_.index_of(rank()); }  // of this rank, on its host
  bool is_here(int rank) const { return hierarchy_.host_of(rank) == hierarchy_.host_of(options_.rank); }
  bool is_waited_for(int rank) const;
  bool is_open(int rank) const;
  void note_parting(int rank, Parting parting);
  void tell_mailbox(int rank, Parting parting);
  void hear_out(const Failure& failure) const;
  void leave(const Operation& operation, const Failure& failure);

  const GroupOptions options_;
  SharedBuffers& shared_buffers_;
  Hub& hub_;
  const Hierarchy hierarchy_;      // which ranks are on which host
  std::vector<int> across_ranks_;  // the ranks with this one's local index, by host, if every host has one
  bool one_host_;
  Patience patience_, background_patience_;  // set at the start, as the next one
  int looks_ = 0;  // checks for completion of a small operation before the call returns
  Alarm alarm_;
  std::atomic<int> waiting_{0};    // operations and messages that are waited for
  std::atomic<int> operations_waiting_{0};            // of these, operations, which wait for all ranks
  std::vector<std::atomic<int>> messages_waiting_;    // of these, messages, by peer
  Board board_;
  PeerBuffers peer_buffers_;
  std::vector<PeerBuffers> offered_buffers_;  // by local index: buffers of messages, which are read from one peer each
  HugePages huge_pages_;
  std::optional<AllowedReads> allowed_reads_;
  std::optional<Watch> watch_;
  std::optional<TcpNetwork> network_;  // if there are several hosts
  std::optional<Host> host_;
  std::unique_ptr<PeerLinks> collective_links_, message_links_;
  std::unique_ptr<AcrossLinks> across_links_;  // of ranks that have a slice in hierarchical operations
  std::optional<OverLinks> over_links_, over_hosts_;
  std::optional<AggregatorLink> aggregator_;  // if there is one; connected by ranks that have a slice
  std::optional<OverAggregator> over_aggregator_, slice_over_aggregator_;
  std::mutex wake_mutex_;  // guards creation and end of the mailbox, and:
  std::vector<std::optional<Parting>> partings_;  // by rank
  std::unique_ptr<Mailbox> mailbox_;
  std::unique_ptr<Executor> executor_;
};

}  // namespace shoal
