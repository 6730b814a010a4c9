#include "group.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <sstream>
#include <thread>

#include "algorithms/hierarchical.h"
#include "common/counted.h"
#include "common/interruption.h"

namespace shoal {

namespace {

// Whether an operation in two levels runs one level after the other and not as one schedule: where flags within the
// host save time, and for sums of 16-bit floats, which are rounded once within the host and once between hosts.
bool goes_level_by_level(const Operation& operation) {
  constexpr size_t large = 512 * 1024;
  if (operation.collective == Collective::barrier) return true;
  return operation.collective == Collective::all_reduce && (operation.bytes < large || is_narrow(operation.dtype));
}

}  // namespace

Group::Group(const GroupOptions& options, SharedBuffers& shared_buffers, Hub& hub)
    : options_(options),
      shared_buffers_(shared_buffers),
      hub_(hub),
      hierarchy_(options.hosts),
      one_host_(hierarchy_.hosts() == 1),
      messages_waiting_(options.hosts.size()),
      board_(static_cast<int>(local_ranks().size())),
      peer_buffers_(shared_buffers),
      partings_(options.hosts.size()) {
  for (size_t index = 0; index < local_ranks().size(); ++index) offered_buffers_.emplace_back(shared_buffers);
  if (index() < hierarchy_.smallest()) across_ranks_ = hierarchy_.across(index());
  Front& front = board_.front(0);
  const LocalPeer self{options_.rank, getpid(),        0,            &front.heartbeat,
                       &front.state,  &front.presence, &front.reason};
  // On one host, a rank that left took part in everything that the others still do. Between hosts its data may be in
  // flight for long, and the end of the connection shows that no more will arrive.
  const Watch::Limits limits{options_.heartbeat, one_host_ ? 0.5 : options_.heartbeat,
                             [this](int peer) { return is_waited_for(peer); },
                             [this](int peer, Parting parting) { note_parting(peer, parting); }};
  watch_.emplace(self, waiting_, limits, alarm_, hub_, [this] { wake_sleepers(); });
  if (!one_host_) {
    network_.emplace(options_.rank, size(), options_.bind_address, options_.streams, alarm_, *watch_, hub_);
  }
}

class Group::PeerLinks final : public Links {
 public:
  PeerLinks(Group& group, int channel, bool may_show)
      : group_(group),
        rings_(group.board_, channel, may_show),
        remote_(group.network_ ? &group.network_->channel(channel) : nullptr) {}

  Link& to(int peer, Deadline deadline) override {
    return group_.is_here(peer) ? ring_to(peer) : remote_->to(peer, deadline);
  }

  void request(int peer) override {
    if (!group_.is_here(peer)) remote_->request(peer);
  }

  Link* find(int peer) override {
    if (peer == group_.rank()) return nullptr;
    return group_.is_here(peer) ? &ring_to(peer) : remote_->find(peer);
  }

 private:
  Link& ring_to(int peer) { return rings_.to(group_.hierarchy_.index_of(peer)); }

  Group& group_;
  RingLinks rings_;
  Links* const remote_;
};

class Group::AcrossLinks final : public Links {
 public:
  explicit AcrossLinks(Group& group) : group_(group) {}
  Link& to(int host, Deadline deadline) override {
    return group_.collective_links_->to(rank_of(host), deadline);
  }
  Link* find(int host) override { return group_.collective_links_->find(rank_of(host)); }
  int rank_of(int host) const override { return group_.across_ranks_[static_cast<size_t>(host)]; }

 private:
  Group& group_;
};

std::string Group::introduce() const {
  std::ostringstream text;
  text << board_.introduce();
  if (network_) text << ' ' << network_->endpoint().process << ' ' << network_->endpoint().address;
  return text.str();
}

Reach Group::join(const std::vector<std::string>& introductions, const Secret& secret, Deadline deadline) {
  std::vector<Introduction> peers_here;
  std::vector<Endpoint> endpoints;
  std::vector<int> remote_ranks;
  for (int rank = 0; rank < size(); ++rank) {
    std::istringstream text(introductions[static_cast<size_t>(rank)]);
    Introduction peer;
    Endpoint& endpoint = endpoints.emplace_back();
    text >> peer >> endpoint.process >> endpoint.address;
    if (is_here(rank)) {
      peers_here.push_back(peer);
    } else {
      remote_ranks.push_back(rank);
    }
  }
  try {
    board_.attach(index(), peers_here, local_ranks());
  } catch (const Failure& failure) {
    if (failure.code == Code::denied) return Reach::denied;
    throw;
  }
  if (board_.size() > 1) watch_neighbours(peers_here);
  if (network_) network_->start(endpoints, remote_ranks, secret, deadline);
  if (network_ && !options_.aggregator.empty()) meet_aggregator(secret);
  return board_.can_read_peers() ? Reach::reads : Reach::copies;
}

void Group::meet_aggregator(const Secret& secret) {
  Greeting greeting;
  greeting.session = session_of(secret);
  greeting.slice = index();
  greeting.host = hierarchy_.host_of(rank());
  greeting.hosts = hierarchy_.hosts();
  greeting.streams = options_.streams;
  greeting.heartbeat = static_cast<int32_t>(options_.heartbeat * 1000);
  AggregatorPulse::Limits limits{options_.heartbeat, [this] { return operations_waiting_.load() > 0; },
                                 [this](Code code, const std::string& text) { watch_->tell(code, -1, text); }};
  aggregator_.emplace(options_.aggregator, options_.aggregator_secret, greeting, hub_.loop(), std::move(limits), alarm_);
}

// In one call on the Hub's thread: with many ranks, a call for each rank would take longer than everything else.
void Group::watch_neighbours(const std::vector<Introduction>& introductions) {
  hub_.loop().start();
  hub_.loop().call([&] {
    for (int other = 0; other < board_.size(); ++other) {
      if (other == index()) continue;
      const Introduction& peer = introductions[static_cast<size_t>(other)];
      Front& front = board_.front(other);
      watch_->add_local({local_ranks()[static_cast<size_t>(other)], peer.pid, peer.started, &front.heartbeat,
                         &front.state, &front.presence, &front.reason});
    }
  });
}

int Group::start(bool can_read_peers) {
  const std::vector<Cores> cores = board_.cores();
  patience_ = patience_for(cores, false);
  background_patience_ = patience_for(cores, true);
  looks_ = patience_.spins / 4;
  host_.emplace(Host{.board = board_,
                     .peer_buffers = peer_buffers_,
                     .shared_buffers = shared_buffers_,
                     .huge_pages = huge_pages_,
                     .alarm = alarm_,
                     .patience = {},
                     .can_read_peers = can_read_peers,
                     .cache_share = cache_share(cores)});
  // Ranks that wait for each other's cores wait once per block.
  const int turns = turns_on_a_core(cores);
  if (turns > 1) host_->most_block_bytes = Board::slot_bytes;
  collective_links_ = std::make_unique<PeerLinks>(*this, 0, can_read_peers);
  message_links_ = std::make_unique<PeerLinks>(*this, 1, false);  // the mailbox handles large messages
  over_links_.emplace(rank(), hierarchy_, *collective_links_, alarm_);
  if (!across_ranks_.empty()) {
    across_links_ = std::make_unique<AcrossLinks>(*this);
    const auto own = std::find(across_ranks_.begin(), across_ranks_.end(), rank()) - across_ranks_.begin();
    over_hosts_.emplace(static_cast<int>(own), Hierarchy(across_ranks_), *across_links_, alarm_);  // a rank on each
  }
  if (aggregator_) {
    over_aggregator_.emplace(rank(), hierarchy_, *collective_links_, *aggregator_, alarm_);
    if (across_links_) {
      slice_over_aggregator_.emplace(hierarchy_.host_of(rank()), Hierarchy(across_ranks_), *across_links_, *aggregator_,
                                     alarm_);
    }
  }
  const auto read = [this](int peer, const Notice& offered, size_t offset, size_t bytes, void* out) {
    const int index = hierarchy_.index_of(peer);
    PeerBuffers& buffers = offered_buffers_[static_cast<size_t>(index)];
    buffers.refresh(board_.pid_of(index), offered.released);
    PeerMemory(board_, buffers, index, offered.input).copy(offset, bytes, out);
  };
  Mailbox::Peers peers{
      .size = size(),
      .links = *message_links_,
      .doorbell = local_ranks().size() > 1 ? &board_.front(board_.index()).doorbell : nullptr,
      .shared_buffers = shared_buffers_,
      .can_read_peers = can_read_peers,
      .is_here = [this](int peer) { return is_here(peer); },
      .is_open = [this](int peer) { return is_open(peer); },
      .read = read,
      .note = [this](const void* data, size_t bytes) { huge_pages_.note(data, bytes); },
  };
  {
    std::lock_guard lock(wake_mutex_);
    mailbox_ = std::make_unique<Mailbox>(std::move(peers), alarm_);
    for (int peer = 0; peer < size(); ++peer) {
      if (const auto parting = partings_[static_cast<size_t>(peer)]) tell_mailbox(peer, *parting);
    }
  }
  const auto run_task = [this](Task& task, bool is_background) { run(task, is_background); };
  executor_ = std::make_unique<Executor>(run_task);
  return turns;
}

// The last user of a group destroys it, in this order: all waits end; peers receive the data of complete sends, while
// the Watch still notices if they end; the Watch says goodbye, after which peers do without this rank; then the threads
// are destroyed, and the links and memory that they used.
Group::~Group() {
  end();
  constexpr double farewell = 5;  // seconds for peers to receive what they were sent
  if (mailbox_) mailbox_->hand_over(Deadline::after(std::max(farewell, options_.heartbeat)));
  watch_->leave();
  executor_.reset();
  over_aggregator_.reset();
  slice_over_aggregator_.reset();
  aggregator_.reset();
  {
    std::lock_guard lock(wake_mutex_);
    mailbox_.reset();
  }
  network_.reset();
  watch_.reset();
}

std::shared_ptr<Task> Group::call(Operation operation, bool asynchronous) {
  alarm_.check();
  require_possible(operation, size(), one_host_);
  const bool is_one_shot = one_host_ && operation.algorithm == Algorithm::one_shot;
  auto idle = is_one_shot ? executor_->try_idle() : std::unique_lock<std::mutex>();
  bool begun = false;
  try {
    if (idle && board_.is_prepared()) {
      host_->patience = patience_;
      board_.begin(call_of(operation));
      begin_one_shot(operation, *host_);
      begun = true;
      for (int look = 0; look < looks_; ++look) {
        if (board_.all_published()) {
          finish_one_shot(operation, *host_);
          return nullptr;
        }
        pause_briefly();
      }
    }
  } catch (const Failure& failure) {
    leave(operation, failure);
    throw;
  }
  auto task = std::make_shared<Task>();
  task->operation = std::move(operation);
  task->begun = begun;
  executor_->enqueue(task, std::move(idle));
  if (asynchronous) executor_->start_background();
  return task;
}

bool Group::wait(Task& task, const std::optional<Deadline>& limit) {
  Counted waiting(waiting_), operation(operations_waiting_);
  if (limit) return executor_->wait_until(task, *limit);
  executor_->wait(task);
  return true;
}

void Group::abort(Code code, int rank, const std::string& text) {
  watch_->tell(code, rank, text);
}

void Group::wake_sleepers() {
  board_.wake_sleepers();
  if (network_) network_->interrupt();
  std::lock_guard lock(wake_mutex_);
  if (mailbox_) mailbox_->wake();
}

// Links are not interrupted, because messages still move; waiting threads check the alarm every few milliseconds.
void Group::end() {
  const auto raise = [this] { return alarm_.raise(Code::aborted, rank(), "the group was closed"); };
  watch_->begin_to_leave();
  if (mailbox_) {
    mailbox_->close(raise);
    mailbox_->wake();
  } else {
    raise();
  }
  board_.wake_sleepers();
}

void Group::settle() {
  if (executor_) executor_->settle();
  if (mailbox_) mailbox_->settle();
}

void Group::run(Task& task, bool is_background) {
  const Operation& operation = task.operation;
  Counted waiting(waiting_), counted(operations_waiting_);
  try {
    alarm_.check();
    host_->patience = is_background ? background_patience_ : patience_;
    if (!task.begun) board_.begin(call_of(operation));
    if (task.begun) {
      finish_one_shot(operation, *host_);
    } else if (one_host_ && operation.algorithm == Algorithm::one_shot) {
      begin_one_shot(operation, *host_);
      finish_one_shot(operation, *host_);
    } else if (one_host_ && operation.algorithm == Algorithm::direct) {
      run_direct(operation, *host_);
    } else if (operation.algorithm == Algorithm::in_network) {
      run_in_network(operation);
    } else if (operation.algorithm == Algorithm::hierarchical && goes_level_by_level(operation)) {
      run_level_by_level(operation);
    } else {
      over_links_->run(operation);
    }
  } catch (const Failure& failure) {
    leave(operation, failure);
    alarm_.check();
    throw;
  } catch (const Interrupted&) {
    const Failure failure(Code::aborted, rank(), "a signal interrupted rank " + std::to_string(rank()));
    leave(operation, failure);
    throw failure;
  } catch (const std::exception& error) {  // such as out of memory: the others must not wait for this rank
    leave(operation, Failure(Code::system, rank(), error.what()));
    throw;
  }
}

// This rank may notice that a peer's process or memory is gone before it reads the peer's reason, which may name
// another rank.
void Group::hear_out(const Failure& failure) const {
  if (failure.rank < 0 || (failure.code != Code::peer_lost && failure.code != Code::system)) return;
  for (int look = 0; look < 50 && !alarm_.is_raised(); ++look) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// Ranks that called different operations cannot meet again. An operation that only this rank cannot serve does not
// affect the others.
void Group::leave(const Operation& operation, const Failure& failure) {
  if (failure.code == Code::invalid) return;
  hear_out(failure);
  abort(failure.code, failure.rank, failure.what());
  const bool is_written_by_peers =
      one_host_ && operation.collective == Collective::all_reduce && operation.algorithm == Algorithm::direct;
  if (!is_written_by_peers) return;
  try {
    shared_buffers_.detach(operation.output);
  } catch (const Failure&) {
    // There are no other pages. The group has failed anyway.
  }
}

void Group::run_level_by_level(const Operation& operation) {
  if (operation.collective == Collective::barrier) {
    board_.pass(host_->patience, alarm_, operation.deadline);
    if (board_.index() == 0) over_hosts_->run(operation);
    board_.pass(host_->patience, alarm_, operation.deadline);
    return;
  }
  run_hierarchical_all_reduce(operation, *host_, hierarchy_.smallest(), [&](std::byte* slice, size_t bytes) {
    Operation across = operation;
    across.algorithm = is_narrow(operation.dtype) ? Algorithm::direct : Algorithm::halving_doubling;
    across.input = across.output = slice;
    across.bytes = bytes;
    over_hosts_->run(across, size());
  });
}

void Group::run_in_network(const Operation& operation) {
  const bool is_possible = operation.collective == Collective::all_reduce && over_aggregator_;
  if (!is_possible) throw Failure(Code::invalid, -1, "there is no aggregator for this operation");
  if (hierarchy_.ranks() == hierarchy_.hosts() || !goes_level_by_level(operation)) {
    return over_aggregator_->run(operation, size());
  }
  run_hierarchical_all_reduce(operation, *host_, hierarchy_.smallest(), [&](std::byte* slice, size_t bytes) {
    Operation across = operation;
    across.input = across.output = slice;
    across.bytes = bytes;
    slice_over_aggregator_->run(across, size());
  });
}

}  // namespace shoal
