// What the ranks of one group show each other on one host: a flag, a notice and two slots each.
//
// Everything happens in ticks. In a tick a rank writes its notice and its slot, and then publishes: its flag becomes
// the tick's number. A rank that sees the flags of all ranks at a tick may read the notices and slots of all ranks for
// that tick. There are two of each, for even and odd ticks: a rank writes those of tick t + 1 only after it saw the
// flags of all ranks at t, and a rank raises its flag to t after it has read the data of t - 1.
//
// With each tick a rank tells which call the tick belongs to. Ranks whose calls differ would use data of another call and
// go on, so they fail instead.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iosfwd>
#include <vector>

#include "common/call.h"
#include "common/cores.h"
#include "common/patience.h"
#include "transport/presence.h"
#include "transport/segment.h"
#include "transport/watch.h"

namespace shoal {

// Where a rank's buffer lies, for the others of its host.
struct Location {
  uint64_t address = 0;     // in the rank's own address space
  uint64_t bytes = 0;
  uint64_t offset = 0;      // in the segment
  SegmentIdentity segment;  // that holds it
  int32_t descriptor = -1;  // of the segment, in the rank's process; -1: private memory
};

struct Notice {
  Location input, output;
  uint32_t released = 0;  // how many segments the process has given back: mappings of these are void
};

// The first page of a rank's segment.
struct Front {
  Flag flag;
  Flag doorbell;  // peers ring it when they wrote to or read from one of this rank's rings
  alignas(64) std::atomic<uint64_t> heartbeat{0};
  std::atomic<uint32_t> state{0};
  std::atomic<int32_t> attached{0};  // how many peers have mapped this
  Presence presence;
  Reason reason{};
  alignas(64) uint64_t cookie = 0;  // a known number, with which peers test whether they can read this process
  alignas(64) Notice notices[2];
  Cores cores;  // the cores that the rank may use
};
static_assert(sizeof(Front) <= 4096);

// A rank of this host, as the ranks introduce themselves to each other.
struct Introduction {
  pid_t pid = 0;
  int descriptor = -1;
  SegmentIdentity segment;  // behind the descriptor
  uint64_t started = 0;     // the start time of the process, to detect a later process with the same number
  uint64_t cookie_address = 0;
};

// As numbers with spaces between.
std::ostream& operator<<(std::ostream& text, const Introduction& introduction);
std::istream& operator>>(std::istream& text, Introduction& introduction);

// A queue of bytes from one process to another. A large region is shown instead of written, one at a time: it comes
// after all bytes that were written before, and the reader takes it in place.
struct Ring {
  static constexpr size_t capacity = 128 * 1024;
  alignas(64) std::atomic<uint64_t> written{0};
  std::atomic<uint64_t> shown{0};  // bytes of all regions so far
  uint64_t shown_end = 0;          // the address after the last region
  alignas(64) std::atomic<uint64_t> read{0};
  std::atomic<uint64_t> taken{0};  // of those shown
  alignas(64) std::byte bytes[capacity];
};

class Board {
 public:
  static constexpr size_t slot_bytes = 1024 * 1024;
  static constexpr int channels = 2;  // of rings: collectives, and point to point

  // This rank's own part, for a host with `size` ranks of the group. Only tests set the first tick.
  explicit Board(int size, uint32_t first_tick = 0);
  ~Board();

  Introduction introduce() const;

  // Maps the parts of the others. `peers` is in the order of local indices, `index` is this rank's own;
  // `ranks` gives each one's rank in the group, for errors.
  void attach(int index, const std::vector<Introduction>& peers, const std::vector<int>& ranks);

  // The cores of every rank, in the order of local indices.
  std::vector<Cores> cores() const;

  // Whether the memory of every peer can be read directly (process_vm_readv).
  bool can_read_peers() const;

  int index() const { return index_; }
  int size() const { return size_; }
  int rank_of(int index) const { return ranks_[index]; }
  pid_t pid_of(int index) const { return peers_[index].pid; }
  Front& front(int index) const { return *reinterpret_cast<Front*>(segments_[index].data()); }
  Ring& ring(int channel, int from, int to) const;

  // --- the tick ---

  // Waits until this rank may write its next notice and slot.
  void prepare(const Patience&, const Alarm&, const Deadline&);
  bool is_prepared() { return settled_ == tick_ || all_published(); }
  Notice& own_notice() { return front(index_).notices[(tick_ + 1) & 1]; }
  std::byte* own_slot() { return slot_of(index_, tick_ + 1); }
  void publish() {
    Flag& flag = front(index_).flag;
    flag.words[(tick_ + 1) & 1] = call_.word();
    flag.set(++tick_);
  }

  // Names the call that the next ticks belong to.
  void begin(Call call) { call_ = call; }

  // Whether the others have published this rank's last tick too; then functions that wait for it, for all ranks or for
  // one. All throw Failure(Code::mismatch) if the tick of another rank belongs to another call.
  bool all_published();
  void await_all(const Patience&, const Alarm&, const Deadline&);
  void await(int index, const Patience&, const Alarm&, const Deadline&) const;

  const Notice& notice(int index) const { return front(index).notices[tick_ & 1]; }
  const std::byte* slot(int index) const { return slot_of(index, tick_); }

  // Ranks agree on what they write into each other's slots: between two ticks only one rank writes a byte.
  uint32_t next_tick() const { return tick_ + 1; }
  std::byte* slot_of(int index, uint32_t tick) const {
    return segments_[index].data() + 4096 + (tick & 1) * slot_bytes;
  }

  // A barrier: nothing is written, and all ranks are seen.
  void pass(const Patience& patience, const Alarm& alarm, const Deadline& deadline) {
    prepare(patience, alarm, deadline);
    publish();
    await_all(patience, alarm, deadline);
  }

  // Wakes the threads of this process that sleep on a flag, so that they check the alarm.
  void wake_sleepers();

 private:
  size_t segment_bytes() const;
  void compare_calls(int index) const {
    if (front(index).flag.words[tick_ & 1] != front(index_).flag.words[tick_ & 1]) refuse_call(index);
  }
  [[noreturn]] void refuse_call(int index) const;
  // Numbers wrap around after 2^32 ticks: compared by difference.
  bool has_reached(uint32_t value) const { return static_cast<int32_t>(value - tick_) >= 0; }

  int size_;
  int index_ = 0;
  uint32_t tick_;
  uint32_t settled_;  // the last tick at which all ranks were seen
  Call call_;
  std::vector<Segment> segments_;
  std::vector<Introduction> peers_;
  std::vector<int> ranks_;
};

}  // namespace shoal
