// A group that threads of the application use, and that may be closed while they do.
//
// A thread visits the group while it uses it. Visits may be nested: a signal handler of the application runs in the
// waiting thread, inside its visit, and may do anything.
//
// Any thread may close the group at any time, a visitor too. This ends the group at once: all waits end and fail with
// "the group was closed", and no new visit may begin.
//
// The last visitor destroys the group, with its threads, connections and memory. A closer counts as a visitor, so this
// happens once. A closer waits for it, but not inside a visit of its own thread to any group: it could wait for itself,
// or for a thread that waits for it. In that case the closer only waits until no other thread touches the memory of
// operations any more; the group is then ended, and the last visitor destroys it.
//
// The owner's shared_ptr keeps the object alive, and so does the object itself from the close until the group is
// destroyed. So the owner may release it inside a visit too.
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

  // A forked process has none of the group's threads, and must not say goodbye for its parent.
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

// Keeps a group alive while a thread uses it.
class Visit {
 public:
  // Throws Failure: aborted if the group was closed; invalid in a forked process.
  explicit Visit(VisitedGroup& group);
  ~Visit();
  Visit(const Visit&) = delete;

  Group* operator->() const { return &*group_.group_; }

 private:
  VisitedGroup& group_;
};

}  // namespace shoal
