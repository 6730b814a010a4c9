// Notices that a rank is gone, has stopped, or has given the group up, and tells the other ranks.
//
// A process of this host is watched through a pidfd, which becomes readable when it ends, and through its data in
// shared memory: a counter that its own Watch increments, a state, and a Presence. A process on another host is watched
// through a Contact, whose connection ends with it, and on which it sends signs of life.
//
// The first reason that any rank finds becomes the alarm of all ranks.
//
// A Watch checks every 20 ms while a thread waits, and every 200 ms after a while without waits: a process may be in
// many groups and use few at a time.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <utility>

#include "common/alarm.h"
#include "transport/contact.h"
#include "transport/event_loop.h"
#include "transport/hub.h"
#include "transport/presence.h"
#include "transport/processes.h"

namespace shoal {

// What a rank's state says, in the lowest eight bits. With `gave_up` the next eight hold the Code and the sixteen above
// them the culprit's rank + 1 (0: no rank). A leaving rank waits until its peers have received what it sent them, and
// then says goodbye.
enum class PeerState : uint32_t { running = 0, said_goodbye = 1, gave_up = 2, leaving = 3 };

// How a peer goes, for the mailboxes of its peers.
enum class Parting { is_leaving, is_gone };

// Why a rank gave the group up, as a text that ends with a zero. Written before the state says that it did.
using Reason = std::array<char, 512>;

// A rank of this host. The pointers lead to memory that all ranks of the host map, and that outlives the Watch.
struct LocalPeer {
  int rank = -1;
  pid_t pid = 0;
  uint64_t started = 0;  // see start_time_of; 0: not known
  std::atomic<uint64_t>* heartbeat = nullptr;
  std::atomic<uint32_t>* state = nullptr;
  Presence* presence = nullptr;  // held by the rank's Watch; null: the end of a large process is noticed late
  Reason* reason = nullptr;      // null: it gives no reason
};

class Watch {
 public:
  struct Limits {
    double silence = 5;  // seconds without a sign of life from an awaited peer
    double absence = 5;  // seconds of waiting for a peer after it, or all peers, said goodbye
    std::function<bool(int rank)> is_waited_for = [](int) { return true; };
    // Called on the loop's thread, perhaps more than once; is_gone for a peer that said goodbye, gave up or ended.
    std::function<void(int rank, Parting)> on_parting = [](int, Parting) {};
  };

  // `waiting` counts the operations that wait for peers: while it is 0, neither a silent peer nor one that said goodbye
  // raises the alarm. The thread that raises the alarm then calls `on_alarm`, once.
  Watch(const LocalPeer& self, const std::atomic<int>& waiting, Limits limits, Alarm& alarm, Hub& hub,
        std::function<void()> on_alarm);

  ~Watch();  // as `leave`

  // Begins to watch a rank. The Hub's thread starts with the first of them.
  void add_local(const LocalPeer& peer);

  // Begins to watch a rank on another host, in the group with this number. Call it on the loop's thread, which also
  // calls both of these: `on_join` when the rank's process is in the group too, `on_request` with the number that its
  // Watch got in `request`.
  struct Remoteness {
    std::function<void()> on_join;
    std::function<void(int number)> on_request;
  };
  void add_remote(int rank, uint64_t group, std::shared_ptr<Contact> contact, Remoteness events);

  // Raises the alarm on every rank of the group, unless it was raised. `rank` is the culprit, or -1.
  void tell(Code code, int rank, const std::string& text);

  // Sends a request to a remote rank. Do not call it after this rank has left.
  void request(int rank, int number);

  // Tells all peers that this rank will leave, so that they receive what it sent them. From any thread.
  void begin_to_leave();

  // Tells all peers to do without this rank from now on, and stops checking: only `tell` calls `on_alarm` after that.
  // Call it before the objects that `on_alarm` and the events of remote ranks use are destroyed.
  void leave();

 private:
  using Time = EventLoop::Clock::time_point;

  // The state of a peer, on any host.
  struct Peer {
    int rank;
    Time last_sign = EventLoop::Clock::now();
    bool is_gone = false;  // and `on_parting` was called for it
    bool said_goodbye = false;
    Time said_goodbye_at{};
    bool has_ended = false;
  };
  struct Local : Peer {
    explicit Local(const LocalPeer& peer) : Peer{peer.rank}, shown(peer) {}

    const LocalPeer shown;
    uint64_t counter = 0;
    Processes::Watcher watcher = 0;  // 0: the process ended, or must be checked
  };
  struct Remote : Peer {
    Remote(int rank, uint64_t group, std::shared_ptr<Contact> contact, Remoteness events)
        : Peer{rank}, group(group), contact(std::move(contact)), events(std::move(events)) {}

    const uint64_t group;
    const std::shared_ptr<Contact> contact;
    const Remoteness events;
  };

  void start();
  void say_goodbye();
  void tick();
  void begin_counting_afresh(Time now);
  void look_at(Local& peer, Time now);
  void process_ended(Local& peer);
  void hear(Remote& peer, const ControlMessage& message);
  void contact_lost(Remote& peer);
  double period() const;
  bool has_everyone_left() const;
  void judge(Peer& peer, Time now);
  void raise(Code code, int rank, const std::string& text, const std::string& told);
  void note_goodbye(Peer& peer);
  void note_parting(Peer& peer, Parting parting);
  void send_to_all(ControlMessage message);

  const LocalPeer self_;
  const std::atomic<int>& waiting_;
  const Limits limits_;
  Alarm& alarm_;
  const std::function<void()> on_alarm_;
  Hub& hub_;
  EventLoop& loop_;

  // Of the loop's thread:
  std::list<Local> locals_;
  std::list<Remote> remotes_;
  Time last_tick_, waiting_since_;
  EventLoop::Timer next_tick_{};
  int idle_ticks_ = 0;  // since the last wait
  bool ticks_ = false;

  std::atomic<bool> is_raising_{false};
  bool has_left_ = false;
};

}  // namespace shoal
