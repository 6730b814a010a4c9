#include "transport/watch.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <utility>

#include "transport/process.h"

namespace shoal {

namespace {

// Seconds between two checks, and so the longest delay of a message from a rank of this host: during waits, and after
// many checks without waits.
constexpr double longest_tick = 0.02, longest_idle_tick = 0.2;
constexpr int idle_after = 25;

double seconds_between(EventLoop::Clock::time_point from, EventLoop::Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

std::string name_of(int rank) { return "rank " + std::to_string(rank); }

uint32_t pack_gave_up(Code code, int rank) {
  return static_cast<uint32_t>(PeerState::gave_up) | static_cast<uint32_t>(code) << 8 |
         static_cast<uint32_t>(rank + 1) << 16;
}

// The text in which a rank tells the others its reason.
std::string account(int teller, Code code, const std::string& text) {
  if (code == Code::peer_lost || code == Code::peer_stopped) return text;
  return name_of(teller) + " gave the group up: " + text;
}

}  // namespace

Watch::Watch(const LocalPeer& self, const std::atomic<int>& waiting, Limits limits, Alarm& alarm, Hub& hub,
             std::function<void()> on_alarm)
    : self_(self),
      waiting_(waiting),
      limits_(limits),
      alarm_(alarm),
      on_alarm_(std::move(on_alarm)),
      hub_(hub),
      loop_(hub.loop()) {}

Watch::~Watch() {
  leave();
  loop_.call([] {});  // now all earlier posted work has run
}

void Watch::add_local(const LocalPeer& shown) {
  start();
  loop_.call([&] {
    Local& peer = locals_.emplace_back(shown);
    const auto on_end = [this, &peer] { process_ended(peer); };
    const auto sight = hub_.processes().watch(shown.pid, shown.started, on_end, peer.watcher);
    if (sight == Processes::Sight::ended) process_ended(peer);
  });
}

void Watch::add_remote(int rank, uint64_t group, std::shared_ptr<Contact> contact, Remoteness events) {
  start();
  loop_.call([&] {
    Remote& peer = remotes_.emplace_back(rank, group, std::move(contact), std::move(events));
    peer.contact->join(group, {.hear = [this, &peer](const ControlMessage& message) { hear(peer, message); },
                               .on_loss = [this, &peer] { contact_lost(peer); }});
  });
}

void Watch::tell(Code code, int rank, const std::string& text) {
  raise(code, rank, text, account(self_.rank, code, text));
}

// `told` is the text for the others. They get it before this rank raises the alarm, because a thread that sees the
// alarm may end the process at once.
void Watch::raise(Code code, int rank, const std::string& text, const std::string& told) {
  if (alarm_.is_raised() || is_raising_.exchange(true)) return;
  if (self_.reason) told.copy(self_.reason->data(), self_.reason->size() - 1);
  self_.state->store(pack_gave_up(code, rank), std::memory_order_release);
  loop_.call([&] { send_to_all({.kind = ControlMessage::Kind::alarm, .code = code, .number = rank, .text = told}); });
  if (alarm_.raise(code, rank, text)) on_alarm_();
}

void Watch::request(int rank, int number) {
  loop_.post([this, rank, number] {
    for (Remote& peer : remotes_) {
      if (peer.rank != rank) continue;
      peer.contact->send({.kind = ControlMessage::Kind::request, .number = number, .group = peer.group});
    }
  });
}

void Watch::begin_to_leave() {
  auto running = static_cast<uint32_t>(PeerState::running);
  if (!self_.state->compare_exchange_strong(running, static_cast<uint32_t>(PeerState::leaving))) return;
  loop_.post([this] { send_to_all({.kind = ControlMessage::Kind::leaving}); });
}

void Watch::leave() {
  if (std::exchange(has_left_, true)) return;
  loop_.call([this] {
    say_goodbye();
    loop_.cancel(next_tick_);
    for (const Local& peer : locals_) {
      if (peer.watcher != 0) hub_.processes().forget(peer.shown.pid, peer.watcher);
    }
    for (const Remote& peer : remotes_) peer.contact->leave(peer.group);
    locals_.clear();
    remotes_.clear();
  });
}

void Watch::start() {
  loop_.start();
  loop_.call([this] {
    if (ticks_) return;
    ticks_ = true;
    if (self_.presence) self_.presence->hold();
    begin_counting_afresh(EventLoop::Clock::now());
    tick();
  });
}

void Watch::say_goodbye() {
  // A rank that gave up has told more than that.
  for (const PeerState state : {PeerState::running, PeerState::leaving}) {
    auto before = static_cast<uint32_t>(state);
    if (!self_.state->compare_exchange_strong(before, static_cast<uint32_t>(PeerState::said_goodbye))) continue;
    send_to_all({.kind = ControlMessage::Kind::goodbye});
    break;
  }
  if (ticks_ && self_.presence) self_.presence->release();
}

double Watch::period() const {
  return std::min(idle_ticks_ > idle_after ? longest_idle_tick : longest_tick, limits_.silence / 4);
}

void Watch::tick() {
  const Time now = EventLoop::Clock::now();
  const bool is_idle = waiting_.load(std::memory_order_relaxed) == 0;
  if (is_idle || idle_ticks_ > idle_after) waiting_since_ = now;
  idle_ticks_ = is_idle ? std::min(idle_ticks_ + 1, idle_after + 1) : 0;
  next_tick_ = loop_.after(period(), [this] { tick(); });
  self_.heartbeat->fetch_add(1, std::memory_order_relaxed);

  // A rank that did not run for long cannot say that others did not run.
  if (seconds_between(last_tick_, now) > limits_.silence / 2) begin_counting_afresh(now);
  last_tick_ = now;

  for (Local& peer : locals_) {
    look_at(peer, now);
    judge(peer, now);
  }
  for (Remote& peer : remotes_) {
    peer.contact->beat(limits_.silence / 4, now);
    peer.last_sign = peer.contact->last_sign();
    judge(peer, now);
  }
}

void Watch::begin_counting_afresh(Time now) {
  last_tick_ = waiting_since_ = now;
  for (Local& peer : locals_) peer.last_sign = now;
  for (const Remote& peer : remotes_) peer.contact->count_afresh(now);
}

void Watch::look_at(Local& peer, Time now) {
  const uint64_t counter = peer.shown.heartbeat->load(std::memory_order_relaxed);
  if (counter != peer.counter) peer.last_sign = now;
  peer.counter = counter;

  const uint32_t state = peer.shown.state->load(std::memory_order_acquire);
  switch (static_cast<PeerState>(state & 0xff)) {
    case PeerState::running:
      break;
    case PeerState::leaving:
      note_parting(peer, Parting::is_leaving);
      break;
    case PeerState::said_goodbye:
      note_goodbye(peer);
      break;
    case PeerState::gave_up: {
      note_parting(peer, Parting::is_gone);
      const auto code = static_cast<Code>(state >> 8 & 0xff);
      const int culprit = static_cast<int>(state >> 16) - 1;
      const std::string text = peer.shown.reason ? peer.shown.reason->data() : name_of(peer.rank) + " gave the group up";
      raise(code, culprit, text, text);
      break;
    }
  }

  // The process is killed, and about to give back its memory; or there is no pidfd. (An ended process exists until its
  // parent has waited for it.)
  if (peer.has_ended) return;
  const bool is_lost = peer.shown.presence && peer.shown.presence->is_lost();
  if (is_lost || (peer.watcher == 0 && kill(peer.shown.pid, 0) != 0 && errno == ESRCH)) process_ended(peer);
}

void Watch::process_ended(Local& peer) {
  peer.has_ended = true;
  if (peer.watcher != 0) hub_.processes().forget(peer.shown.pid, std::exchange(peer.watcher, 0));
  look_at(peer, EventLoop::Clock::now());  // its last words
  note_parting(peer, Parting::is_gone);
  if (peer.said_goodbye) return;
  tell(Code::peer_lost, peer.rank,
       name_of(peer.rank) + " (process " + std::to_string(peer.shown.pid) + ") ended");
}

void Watch::hear(Remote& peer, const ControlMessage& message) {
  switch (message.kind) {
    case ControlMessage::Kind::heartbeat:
      break;
    case ControlMessage::Kind::join:
      peer.events.on_join();
      break;
    case ControlMessage::Kind::goodbye:
      note_goodbye(peer);
      break;
    case ControlMessage::Kind::leaving:
      note_parting(peer, Parting::is_leaving);
      break;
    case ControlMessage::Kind::alarm:
      note_parting(peer, Parting::is_gone);
      raise(message.code, message.number, message.text, message.text);
      break;
    case ControlMessage::Kind::request:
      peer.events.on_request(message.number);
      break;
  }
}

void Watch::contact_lost(Remote& peer) {
  peer.has_ended = true;
  note_parting(peer, Parting::is_gone);
  if (peer.said_goodbye) return;
  tell(Code::peer_lost, peer.rank, name_of(peer.rank) + " ended, or the connection with it did");
}

bool Watch::has_everyone_left() const {
  const auto has_left = [](const Peer& peer) { return peer.said_goodbye; };
  return std::all_of(locals_.begin(), locals_.end(), has_left) && std::all_of(remotes_.begin(), remotes_.end(), has_left);
}

void Watch::judge(Peer& peer, Time now) {
  if (alarm_.is_raised()) return;
  if (peer.said_goodbye) {
    if (!limits_.is_waited_for(peer.rank) && !has_everyone_left()) peer.said_goodbye_at = now;
    if (seconds_between(std::max(peer.said_goodbye_at, waiting_since_), now) <= limits_.absence) return;
    tell(Code::peer_lost, peer.rank, name_of(peer.rank) + " left the group");
  } else {
    if (seconds_between(std::max(peer.last_sign, waiting_since_), now) <= limits_.silence) return;
    char seconds[32];
    std::snprintf(seconds, sizeof seconds, "%.3g", limits_.silence);
    tell(Code::peer_stopped, peer.rank,
         name_of(peer.rank) + " has given no sign of life for " + seconds + " s");
  }
}

void Watch::note_goodbye(Peer& peer) {
  if (peer.said_goodbye) return;
  peer.said_goodbye = true;
  peer.said_goodbye_at = EventLoop::Clock::now();
  note_parting(peer, Parting::is_gone);
}

void Watch::note_parting(Peer& peer, Parting parting) {
  if (peer.is_gone) return;
  peer.is_gone = parting == Parting::is_gone;
  limits_.on_parting(peer.rank, parting);
}

void Watch::send_to_all(ControlMessage message) {
  for (const Remote& peer : remotes_) {
    if (peer.has_ended) continue;
    message.group = peer.group;
    peer.contact->send(message);
  }
}

}  // namespace shoal
