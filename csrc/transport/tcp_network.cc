#include "transport/tcp_network.h"

#include <algorithm>
#include <map>
#include <utility>

#include "common/interruption.h"

namespace shoal {

namespace {

// Seconds between checks of the alarm by a waiting thread.
constexpr double alarm_look = 0.02;

bool is_channel(int number) { return number >= 0 && number < TcpNetwork::channels; }

}  // namespace

class TcpNetwork::Channel final : public Links {
 public:
  Channel(TcpNetwork& network, int number, int size)
      : network_(network), number_(number), peers_(static_cast<size_t>(size)) {}

  Link& to(int peer, Deadline deadline) override {
    request(peer);
    const Peer& entry = peers_[static_cast<size_t>(peer)];
    std::unique_lock lock(network_.mutex_);
    if (!network_.await([&] { return entry.link != nullptr; }, lock, deadline)) {
      lock.unlock();
      network_.fail_to_reach(peer);
    }
    return *entry.link;
  }

  void request(int peer) override {
    {
      std::lock_guard lock(network_.mutex_);
      Peer& entry = peers_[static_cast<size_t>(peer)];
      if (entry.link || std::exchange(entry.is_requested, true)) return;
    }
    if (peer > network_.rank_) return network_.watch_.request(peer, number_);
    network_.hub_.loop().post([this, peer] { dial(peer); });
  }

  Link* find(int peer) override {
    std::lock_guard lock(network_.mutex_);
    return peers_[static_cast<size_t>(peer)].link.get();
  }

  // Takes in one of a link's connections. The lock is held.
  void take(int peer, int stream, Descriptor socket) {
    Peer& entry = peers_[static_cast<size_t>(peer)];
    if (entry.link) return;
    // A second connection for the same stream means that the dialer had to connect again: the first is useless.
    entry.arrived[stream] = std::move(socket);
    if (entry.arrived.size() < static_cast<size_t>(network_.streams_)) return;
    std::vector<Descriptor> sockets;
    for (auto& [number, each] : entry.arrived) sockets.push_back(std::move(each));
    entry.arrived.clear();
    entry.link = std::make_unique<TcpLink>(peer, std::move(sockets), network_.alarm_);
  }

  // The lock is held.
  void interrupt() {
    for (Peer& entry : peers_) {
      if (entry.link) entry.link->interrupt();
    }
  }

 private:
  struct Peer {
    bool is_requested = false;
    std::map<int, Descriptor> arrived;  // by stream: connections of a link that is not whole yet
    std::unique_ptr<TcpLink> link;
  };

  void dial(int peer) {
    const std::string& address = network_.endpoints_[static_cast<size_t>(peer)].address;
    for (int stream = 0; stream < network_.streams_; ++stream) {
      network_.hub_.dial(address, {network_.group_, network_.rank_, peer, number_, stream});
    }
  }

  TcpNetwork& network_;
  const int number_;
  std::vector<Peer> peers_;  // by rank
};

TcpNetwork::TcpNetwork(int rank, int size, const std::string& bind_address, int streams, const Alarm& alarm,
                       Watch& watch, Hub& hub)
    : rank_(rank),
      streams_(streams),
      alarm_(alarm),
      watch_(watch),
      hub_(hub),
      endpoint_(hub.listen(bind_address)),
      standings_(static_cast<size_t>(size), Standing::local) {
  for (size_t number = 0; number < channels_.size(); ++number) {
    channels_[number] = std::make_unique<Channel>(*this, static_cast<int>(number), size);
  }
}

TcpNetwork::~TcpNetwork() {
  hub_.loop().call([this] {
    if (is_enrolled_) hub_.withdraw(group_);
  });
}

void TcpNetwork::start(const std::vector<Endpoint>& endpoints, const std::vector<int>& remote_ranks,
                       const Secret& secret, Deadline deadline) {
  endpoints_ = endpoints;
  group_ = number_of(secret);
  for (int peer : remote_ranks) standings_[static_cast<size_t>(peer)] = Standing::missing;
  hub_.loop().call([&] {
    hub_.enrol(group_, {secret, rank_, [this](const Purpose& purpose, Descriptor socket) {
                          admit(purpose, std::move(socket));
                        }});
    is_enrolled_ = true;
    for (int peer : remote_ranks) {
      const Endpoint& endpoint = endpoints_[static_cast<size_t>(peer)];
      watch_.add_remote(peer, group_, hub_.contact(endpoint, group_, peer),
                        {.on_join = [this, peer] { note_join(peer); },
                         .on_request = [this, peer](int channel) {
                           if (!is_channel(channel) || peer > rank_) return;
                           channels_[static_cast<size_t>(channel)]->request(peer);
                         }});
    }
  });

  const auto first_missing = [this] {
    return std::find(standings_.begin(), standings_.end(), Standing::missing);
  };
  std::unique_lock lock(mutex_);
  if (await([&] { return first_missing() == standings_.end(); }, lock, deadline)) return;
  const int missing = static_cast<int>(first_missing() - standings_.begin());
  lock.unlock();
  fail_to_reach(missing);
}

Links& TcpNetwork::channel(int number) { return *channels_.at(static_cast<size_t>(number)); }

void TcpNetwork::interrupt() {
  std::lock_guard lock(mutex_);
  for (const auto& channel : channels_) channel->interrupt();
  changed_.notify_all();
}

void TcpNetwork::admit(const Purpose& purpose, Descriptor socket) {
  const bool is_own_call = purpose.from == rank_;
  const int peer = is_own_call ? purpose.to : purpose.from;
  // A proven member follows the rules, unless its options differ from this rank's.
  if (peer < 0 || peer >= static_cast<int>(standings_.size()) || is_own_call != (peer < rank_)) return;
  if (!is_channel(purpose.channel) || purpose.stream < 0 || purpose.stream >= streams_) return;
  std::lock_guard lock(mutex_);
  // After the alarm nothing would interrupt it.
  if (alarm_.is_raised()) return;
  channels_[static_cast<size_t>(purpose.channel)]->take(peer, purpose.stream, std::move(socket));
  changed_.notify_all();
}

void TcpNetwork::note_join(int peer) {
  std::lock_guard lock(mutex_);
  standings_[static_cast<size_t>(peer)] = Standing::joined;
  changed_.notify_all();
}

template <class Ready>
bool TcpNetwork::await(const Ready& ready, std::unique_lock<std::mutex>& lock, Deadline deadline) {
  while (!ready()) {
    alarm_.check();
    if (deadline.has_passed()) return false;
    const double seconds = std::min(alarm_look, deadline.remaining());
    changed_.wait_for(lock, std::chrono::duration<double>(seconds));
    lock.unlock();
    run_signal_handlers();
    lock.lock();
  }
  return true;
}

void TcpNetwork::fail_to_reach(int peer) {
  Dialer::Trouble trouble;
  hub_.loop().call([&] { trouble = hub_.trouble_with(group_, peer); });
  const std::string text = "no connection with rank " + std::to_string(peer) + " came about in time";
  if (trouble.text.empty()) throw Failure(Code::timeout, peer, text);
  throw Failure(trouble.was_refused ? Code::refused : Code::timeout, peer, text + ": " + trouble.text);
}

}  // namespace shoal
