#include "visited_group.h"

#include <utility>

namespace shoal {

namespace {
thread_local int visits = 0;  // of this thread, nested
}

void VisitedGroup::close() {
  if (is_forked()) return;
  if (enter(closed)) {
    self_ = shared_from_this();
    group_->end();
    if (visits > 0) group_->settle();
    leave();
  }
  if (visits > 0) return;
  std::unique_lock lock(mutex_);
  destroyed_.wait(lock, [this] { return is_destroyed_; });
}

// Counts in a visitor or a closer; false if the group is closed already.
bool VisitedGroup::enter(uint32_t bits) {
  uint32_t now = visitors_.load(std::memory_order_relaxed);
  do {
    if ((now & closed) != 0) return false;
  } while (!visitors_.compare_exchange_weak(now, (now + 1) | bits, std::memory_order_seq_cst));
  return true;
}

void VisitedGroup::leave() {
  if (is_forked() || visitors_.fetch_sub(1, std::memory_order_seq_cst) != (closed | 1)) return;
  const std::shared_ptr<VisitedGroup> self = std::move(self_);
  group_.reset();
  hub_.reset();
  std::lock_guard lock(mutex_);
  is_destroyed_ = true;
  destroyed_.notify_all();
}

Visit::Visit(VisitedGroup& group) : group_(group) {
  if (group.is_forked()) {
    throw Failure(Code::invalid, -1, "a process that was forked off a rank is not part of its groups");
  }
  if (!group.enter(0)) throw Failure(Code::aborted, -1, "the group was closed");
  ++visits;
}

Visit::~Visit() {
  --visits;
  group_.leave();
}

}  // namespace shoal
