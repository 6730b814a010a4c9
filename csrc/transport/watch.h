// Who notices that a rank is gone, has stopped, or has given the group up; and who tells the others.
//
// A process of this host is watched through a pidfd, which becomes readable when it ends, and through what it
// has in shared memory: a counter that its own Watch increments, a state, and a Presence. A process elsewhere
// is watched through a Contact, whose connection ends with it, and on which it sends signs of life.
//
// The first reason that is found, by any rank, becomes the alarm of all.
//
// A Watch looks every 20 ms while something is waited for, and every 200 ms once nothing was for a while: a process
// may be in many groups, of which it uses few at a time.
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

// What a rank's state says, in the lowest eight bits. With `gave_up` the next eight hold the Code and the
// sixteen above them the culprit's rank + 1 (0: nobody in particular).
// A rank that is leaving waits for its peers to take in what it sent them, and then says goodbye.
enum class PeerState : uint32_t { running = 0, said_goodbye = 1, gave_up = 2, leaving = 3 };

// How a peer goes, as its mailbox's correspondents have to know.
enum class Parting { is_leaving, is_gone };

// Why a rank gave the group up, in words that end with a zero. Written before the state says that it did.
using Reason = std::array<char, 512>;

// A rank of this host. What it points to is in memory that all ranks of the host map, and outlives the Watch.
struct LocalPeer {
  int rank = -1;
  pid_t pid = 0;
  uint64_t started = 0;  // see start_time_of; 0: not known
  std::atomic<uint64_t>* heartbeat = nullptr;
  std::atomic<uint32_t>* state = nullptr;
  Presence* presence = nullptr;  // held by the rank's Watch; null: the end of a large process shows late
  Reason* reason = nullptr;      // null: it gives none
};

class Watch {
 public:
  struct Limits {
    double silence = 5;  // seconds without a sign of life, of a peer that is waited for
    double absence = 5;  // seconds of waiting after a peer said goodbye, for that peer or when all did
    std::function<bool(int rank)> is_waited_for = [](int) { return true; };
    // Called in the loop's thread, perhaps more than once; of one that said goodbye, gave up or ended: is_gone.
    std::function<void(int rank, Parting)> on_parting = [](int, Parting) {};
  };

  // `waiting` counts the operations that wait for peers: while it is 0, neither a silent peer nor one that
  // said goodbye raises the alarm. `on_alarm` is called once, after the alarm was raised, by the thread that
  // did it.
  Watch(const LocalPeer& self, const std::atomic<int>& waiting, Limits limits, Alarm& alarm, Hub& hub,
        std::function<void()> on_alarm);

  ~Watch();  // as `leave`

  // Begins to watch a rank. The Hub's thread starts with the first of them.
  void add_local(const LocalPeer& peer);

  // The same of a rank on another host, of the group with that number. On the loop's thread, as both of these:
  // `on_join` is called when its process is in the group too, `on_request` with what its Watch was given as `request`.
  struct Remoteness {
    std::function<void()> on_join;
    std::function<void(int number)> on_request;
  };
  void add_remote(int rank, uint64_t group, std::shared_ptr<Contact> contact, Remoteness events);

  // Raises the alarm on every rank of the group, unless it was raised. `rank` is the culprit, or -1.
  void tell(Code code, int rank, const std::string& text);

  // Asks a remote rank for something. Not once this one has left.
  void request(int rank, int number);

  // Tells all peers that this rank is about to leave, so that they take in what it sent them. From any thread.
  void begin_to_leave();

  // Tells all peers that this rank may be missed from now on, and looks no more: `on_alarm` is called by `tell` only.
  // To be called before what `on_alarm` and the events of remote ranks touch is destroyed.
  void leave();

 private:
  using Time = EventLoop::Clock::time_point;

  // What is known of a peer, wherever it is.
  struct Peer {
    int rank;
    Time last_sign = EventLoop::Clock::now();
    bool is_gone = false;  // and whoever wants to know that does
    bool said_goodbye = false;
    Time said_goodbye_at{};
    bool has_ended = false;
  };
  struct Local : Peer {
    explicit Local(const LocalPeer& peer) : Peer{peer.rank}, shown(peer) {}

    const LocalPeer shown;
    uint64_t counter = 0;
    Processes::Watcher watcher = 0;  // 0: the process ended, or has to be looked for
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
  int idle_ticks_ = 0;  // since something was waited for
  bool ticks_ = false;

  std::atomic<bool> is_raising_{false};
  bool has_left_ = false;
};

}  // namespace shoal
