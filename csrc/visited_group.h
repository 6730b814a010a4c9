// A group that threads of the application use, and that may be closed while they do.
//
// Who uses the group makes a visit, which may be within another one: a signal handler of the application runs in the
// thread that waits, within its visit, and may do what it likes.
//
// Who may close: any thread at any time, a visitor too. Closing ends the group at once: who waits is freed, and fails
// with "the group was closed"; nobody gets in any more.
//
// Who frees: the last one out. A closer counts as a visitor, so the group is destroyed, once, by whoever finds that
// nobody else is in: its threads, connections and memory are gone then. Who closes waits for that, but not within a
// visit of its own thread, to this group or another: it would wait for itself, or for one who waits for it. Then it
// goes on with the group ended, once no other thread touches the memory of operations any more, and the last visitor
// destroys the group on the way out.
//
// Who keeps the object: its owner's shared_ptr, and from the moment that it is closed to the moment that the group is
// destroyed the object itself. So its owner may let go of it within a visit too.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "group.h"
#include "transport/hub.h"
#include "transport/process.h"

namespace shoal {

class VisitedGroup : public std::enable_shared_from_this<VisitedGroup> {
 public:
  VisitedGroup(const GroupOptions& options, SharedBuffers& shared_buffers, std::shared_ptr<Hub> hub)
      : hub_(std::move(hub)), group_(std::in_place, options, shared_buffers, *hub_) {}

  void close();

  // Forked off, a process has none of the group's threads, and must not say goodbye for its parent.
  bool is_forked() const { return generation() != born_in_; }

 private:
  friend class Visit;
  static constexpr uint32_t closed = uint32_t{1} << 31;

  bool enter(uint32_t bits);
  void leave();

  std::shared_ptr<Hub> hub_;
  std::optional<Group> group_;
  const unsigned born_in_ = generation();
  std::atomic<uint32_t> visitors_{0};  // how many there are, and whether it is closed
  std::shared_ptr<VisitedGroup> self_;  // while it is closed and not destroyed
  std::mutex mutex_;
  std::condition_variable destroyed_;
  bool is_destroyed_ = false;
};

// Keeps a group there while a thread uses it.
class Visit {
 public:
  // Throws Failure: aborted, if the group was closed; invalid, in a process that was forked off.
  explicit Visit(VisitedGroup& group);
  ~Visit();
  Visit(const Visit&) = delete;

  Group* operator->() const { return &*group_.group_; }

 private:
  VisitedGroup& group_;
};

}  // namespace shoal
