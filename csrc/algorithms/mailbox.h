// Messages from one rank to another, matched by sender and tag.
//
// A message is a header and its bytes, written to the link towards its receiver. A larger one between processes of
// a host is only offered: the receiver reads it from where it lies, when it wants it, and then says so. That is the
// sender's memory, if it is in a shared buffer or may be read all the same, or a copy in a shared buffer: then the
// message is done at once. What comes before anybody asked for it is kept here.
//
// Whoever waits makes all messages of the group progress; while nobody waits, a thread of the mailbox does.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "common/alarm.h"
#include "common/deadline.h"
#include "common/patience.h"
#include "transport/board.h"
#include "transport/link.h"
#include "transport/shared_buffers.h"

namespace shoal {

// A send or a receive that was posted.
struct Message {
  const int peer;  // -1 of a receive: from anyone
  const int tag;
  std::byte* data;  // of a send it is only read
  size_t bytes;
  int sender = -1;      // of a receive, read after `done`
  double finished = 0;  // when it was done, in seconds of the monotonic clock
  std::atomic<bool> done{false};
  std::exception_ptr failure;  // read after `done`
};

class Mailbox {
 public:
  struct Peers {
    int size;
    Links& links;
    Flag* doorbell;  // rung by peers on this host when they wrote or read; null if there are none
    SharedBuffers& shared_buffers;
    bool can_read_peers;  // of this host, in their private memory
    std::function<bool(int peer)> is_here;
    // Reads what a peer on this host offers.
    std::function<void(int peer, const Notice& offered, size_t offset, size_t bytes, void* out)> read;
  };

  Mailbox(Peers peers, const Alarm& alarm);
  ~Mailbox();

  // Both return at once. The bytes must stay until the message is done; `done` may be set already.
  std::shared_ptr<Message> send(int peer, int tag, const void* data, size_t bytes);
  std::shared_ptr<Message> receive(int peer, int tag, void* data, size_t bytes);

  // Returns when the message is done; throws what went wrong with it. After the deadline no message is
  // served.
  void wait(Message& message, const Patience& patience, const Deadline& deadline);

  // Returns then at the latest: false if the message is not done. Throws nothing but Interrupted.
  bool wait_until(Message& message, const Patience& patience, const Deadline& limit);

  // Ends what the alarm has ended.
  void wake();

 private:
  class Waiter;
  struct Header {
    enum class Kind : uint32_t { bytes, offer, taken };
    Kind kind = Kind::bytes;
    int32_t tag = 0;
    uint64_t bytes = 0;
    Notice offered = {};  // by an offer, as an input
    uint64_t number = 0;  // of an offer, and of its having been taken
  };
  struct Outgoing {
    Header header;
    const std::byte* data;
    size_t sent = 0;  // of header and bytes
    std::shared_ptr<Message> message;  // done when all is sent; null: nobody waits
  };
  struct Offered {
    std::shared_ptr<Message> message;  // done when it is taken; null if it is done already, as there is
    void* copy;                        // a copy, or null
    size_t bytes;
  };
  // A message that came, or is coming, before it was asked for.
  struct Early {
    int peer;
    Header header;
    std::vector<std::byte> bytes;
    bool complete = false;
    std::shared_ptr<Message> wanted_by;
  };
  struct Incoming {
    Header header;
    size_t header_bytes = 0;
    size_t received = 0;
    std::shared_ptr<Message> message;     // where the bytes go, or
    std::list<Early>::iterator early;     // this, or
    bool is_early = false;                // neither: they are thrown away
  };

  void request_link(int peer);
  bool progress();
  void take_in_what_came();
  bool progress_sends(int peer, Link& link);
  bool progress_receives(int peer, Link& link);
  void begin(int peer, Incoming& incoming);
  void end(int peer, Incoming& incoming);
  void take(int peer, const Header& header, Message* message);
  void deliver(Early& early);
  bool check_size(int peer, const Header& header, Message& message);
  void finish(Message& message);
  void fail(Message& message, std::exception_ptr failure);
  void fail_all(std::exception_ptr failure);
  void sleep(std::unique_lock<std::mutex>& lock, double seconds);
  void run();
  void leave_to_thread();

  // What goes wrong with one peer ends all messages, as it ends the group.
  template <class Work>
  void attempt(const Work& work) {
    try {
      work();
    } catch (...) {
      fail_all(std::current_exception());
    }
  }

  bool offer(Outgoing& outgoing);
  bool is_left() const { return pending_ > 0 && waiters_ == 0 && !broken_; }

  static constexpr size_t offered_bytes = 64 * 1024;  // from this size on, messages are offered, not written
  static constexpr size_t copied_bytes = 2 * 1024 * 1024;  // up to this size, copied rather than read by the system
  static constexpr size_t copies_bytes = 32 * 1024 * 1024;  // of all copies that were not taken yet, at most

  Peers peers_;
  const Alarm& alarm_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::deque<Outgoing>> outgoing_;
  std::vector<Incoming> incoming_;
  std::vector<bool> is_requested_;  // by rank: the link towards it
  std::list<std::shared_ptr<Message>> posted_;  // receives, in the order in which they were posted
  std::list<Early> early_;
  std::map<uint64_t, Offered> offered_;
  size_t copied_ = 0;  // bytes, of the copies offered
  uint64_t next_number_ = 0;
  size_t pending_ = 0;  // messages that are not done, and answers to offers that are not sent
  int waiters_ = 0;
  bool stopped_ = false;
  std::exception_ptr broken_;
  std::thread thread_;
  bool is_resting_ = false;  // the thread, until it is told of work
  bool is_in_use_ = false;   // something was left to the thread since it last looked
};

}  // namespace shoal
