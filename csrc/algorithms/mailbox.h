// Messages from one rank to another, matched by sender and tag.
//
// Every message begins with a header on the link towards its receiver, and headers always flow: a wait for one message
// never depends on a receive for another. The place of the bytes depends on the size:
//
// - A small message is *eager*: its bytes follow, and are kept here until a receive asks for them. A sender has credit
//   for a number of such bytes at each receiver; the credit comes back as they are received.
// - Larger ones, and small ones without credit, stay with the sender. Within a host they are *offered*: the receiver
//   reads them in place when it wants them, and then says so. The place is the sender's memory, if it is in a shared
//   buffer or peers may read it; or a copy in a shared buffer, in which case the send is complete at once. Otherwise
//   they are *announced*: the receiver says that it wants them, and their bytes flow into its tensor.
//
// A waiting thread makes all messages of the group progress; while no thread waits, a thread of the mailbox does. A
// thread that posts a message gets the lock before waiting threads, after at most `piece_bytes` have been moved. Data
// is read from a peer without the lock, by one thread for each peer: a message is not done, and does not fail, before
// that thread has stopped.
//
// A rank that leaves first delivers what its complete sends have promised (mailbox_leaving.cc).
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "algorithms/correspondent.h"
#include "algorithms/message.h"
#include "algorithms/offers.h"
#include "common/alarm.h"
#include "common/deadline.h"
#include "common/patience.h"
#include "transport/board.h"
#include "transport/link.h"
#include "transport/shared_buffers.h"

namespace shoal {

class Mailbox {
 public:
  // Within a host and between hosts: smaller messages are eager.
  static constexpr size_t eager_here = 64 * 1024, eager_elsewhere = 1024 * 1024 + 1;

  struct Peers {
    int size;
    Links& links;
    Flag* doorbell;  // peers on this host ring it when they wrote or read; null if there are none
    SharedBuffers& shared_buffers;
    bool can_read_peers;  // of this host, in their private memory
    std::function<bool(int peer)> is_here;
    // Whether a peer on this host has not begun to leave or give up. Until then, its offered data is unchanged.
    std::function<bool(int peer)> is_open;
    // Reads data that a peer on this host offers; for each peer, one thread at a time.
    std::function<void(int peer, const Notice& offered, size_t offset, size_t bytes, void* out)> read;
    // Tells the system that peers will read this private memory. May take long.
    std::function<void(const void* data, size_t bytes)> note;
  };

  Mailbox(Peers peers, const Alarm& alarm);

  // No thread waits any more. Copies that peers have not taken are discarded.
  ~Mailbox();

  // Both return at once. A receive, and a send of less than `posting_bytes`, move at most `posting_bytes`; a larger
  // send copies or writes up to Offers::largest_copy. The bytes must stay until the message is done; `done` may be set
  // already.
  std::shared_ptr<Message> send(int peer, int tag, const void* data, size_t bytes);
  std::shared_ptr<Message> receive(int peer, int tag, void* data, size_t bytes);

  // Returns when the message is done; throws its error. After the deadline no message is served.
  void wait(Message& message, const Patience& patience, const Deadline& deadline);

  // Returns at `limit` at the latest: false if the message is not done. Throws only Interrupted.
  bool wait_until(Message& message, const Patience& patience, const Deadline& limit);

  // Ends all messages after the alarm.
  void wake();

  // --- leaving ---

  // Fails every message that is not done, and every later one, with the alarm's error. `raise` raises the alarm: it
  // returns false if the alarm was raised before, and then nothing more is delivered.
  void close(const std::function<bool()>& raise);

  // After `close`: returns when no thread reads into a message's memory any more.
  void settle();

  // After `close`: returns when the peers have received all data of complete sends, or have ended, or the deadline has
  // passed. Call it from one thread.
  void hand_over(const Deadline& deadline);

  // The Watch calls these, any number of times: a peer wants its last messages to be received, or is gone.
  void note_leaving(int peer);
  void note_gone(int peer);

 private:
  class Waiter;
  class Posting;

  static constexpr size_t posting_bytes = 64 * 1024;        // the most that posting a small message moves each way
  static constexpr size_t serving_bytes = 1024 * 1024;      // each way with a peer, before others have their turn
  static constexpr size_t piece_bytes = 128 * 1024;         // moved before a waiting thread checks for posting threads
  static constexpr size_t reading_bytes = 4 * 1024 * 1024;  // read without the lock before the alarm is checked
  static constexpr size_t content_bytes = 1024 * 1024;      // in a frame, so that other frames come in between

  // mailbox.cc: matching sends and receives, and their completion
  void prepare_offer(Offer& offer, Notice& notice);
  void request_link(int peer);
  bool match_early(const std::shared_ptr<Message>& message);
  std::shared_ptr<Message> match_posted(int peer, int tag);
  void accept(int peer, const Header& header, const std::shared_ptr<Message>& message);
  void deliver(std::list<Early>::iterator early);
  bool check_size(int peer, const Header& header, Message& message);
  void finish(Message& message);
  void fail(Message& message, std::exception_ptr failure);
  void fail_all(const std::exception_ptr& failure);
  void fail_pending();

  // mailbox_frames.cc: how they move
  bool progress();
  bool is_connected(int peer);
  bool serve(int peer, size_t limit);
  void judge_failure(Correspondent& with_peer);
  void take_in_what_came();
  void push(int peer, Frame frame);
  void answer(int peer, Header::Kind kind, uint64_t number = 0);
  bool write_frames(int peer, size_t limit);
  bool has_frame(Correspondent& to);
  void end_frame(Correspondent& to, const Frame& frame);
  bool read_frames(int peer, size_t limit);
  void begin(int peer, Incoming& incoming);
  void end(int peer, Incoming& incoming);
  void return_credit(int peer, size_t bytes);

  // mailbox_reading.cc
  size_t read_offered(std::unique_lock<std::mutex>& lock, size_t most_bytes = SIZE_MAX);
  void end_reading(int peer, bool is_read);

  // mailbox_leaving.cc
  void keep_what_is_promised(Correspondent& to);
  bool is_to_be_told(int peer) const;
  void hear_out(int peer);
  void answer_if_heard(int peer);
  void stop_expecting(Correspondent& from);
  static std::exception_ptr left(int peer);

  // mailbox_waiting.cc
  void give_way(std::unique_lock<std::mutex>& lock);
  void note_private_memory(std::unique_lock<std::mutex>& lock);
  bool is_being_read(const Message& message) const;
  void sleep(std::unique_lock<std::mutex>& lock, double seconds);
  void leave_to_thread(bool at_once = false);
  void run();

  // An error with one peer ends all messages, as it ends the group.
  template <class Work>
  void attempt(const Work& work) {
    try {
      work();
    } catch (...) {
      fail_all(std::current_exception());
    }
  }

  Correspondent& with(int peer) { return correspondents_[static_cast<size_t>(peer)]; }
  const Correspondent& with(int peer) const { return correspondents_[static_cast<size_t>(peer)]; }
  bool somebody_posts() const { return posting_.load(std::memory_order_relaxed) > 0; }
  bool is_left() const {
    return waiters_ == 0 && !broken_ && (pending_ > 0 || frames_ > 0 || readings_ > 0 || expected_ > 0);
  }

  Peers peers_;
  const Alarm& alarm_;
  Offers offers_;
  std::mutex mutex_;
  std::atomic<int> posting_{0};  // threads that want the lock to post
  std::condition_variable changed_;  // signals work for the thread
  std::condition_variable read_;     // a thread has read a piece of an offered message
  std::vector<Correspondent> correspondents_;   // by rank
  std::list<std::shared_ptr<Message>> posted_;  // receives, in the order in which they were posted
  std::list<Early> early_;
  std::deque<std::weak_ptr<Message>> not_noted_;  // sends of private memory that peers are about to read
  int first_ = 0;        // the peer that is served first
  size_t pending_ = 0;   // messages that are not done
  size_t frames_ = 0;    // to be written, and contents
  size_t readings_ = 0;  // messages to be read
  int expected_ = 0;     // peers that announced that they will leave
  int waiters_ = 0;
  bool stopped_ = false;
  std::exception_ptr broken_;  // why nothing can be posted any more
  bool delivers_ = false;      // it was closed in order: data of complete sends still moves
  std::thread thread_;
  bool is_resting_ = false;  // the thread, until it is told of work
  bool is_in_use_ = false;   // the thread has got work since it last looked
};

}  // namespace shoal
