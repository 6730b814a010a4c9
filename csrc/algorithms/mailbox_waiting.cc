// Who waits for messages, and the thread that goes on with them while nobody does.

#include <poll.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include "algorithms/mailbox.h"
#include "common/interruption.h"
#include "common/quiet_thread.h"

namespace shoal {

// While there is one, the mailbox's own thread has nothing to do. Made and gone with the lock held.
class Mailbox::Waiter {
 public:
  Waiter(Mailbox& mailbox, std::unique_lock<std::mutex>& lock) : mailbox_(mailbox), lock_(lock) {
    ++mailbox_.waiters_;
  }
  ~Waiter() {
    if (!lock_.owns_lock()) lock_.lock();
    --mailbox_.waiters_;
    mailbox_.leave_to_thread();
  }
  Waiter(const Waiter&) = delete;

 private:
  Mailbox& mailbox_;
  std::unique_lock<std::mutex>& lock_;
};

void Mailbox::wait(Message& message, const Patience& patience, const Deadline& deadline) {
  if (!wait_until(message, patience, deadline)) {
    // Ends the other messages too, so that nothing is written any more to where this one's bytes are.
    std::lock_guard lock(mutex_);
    if (!message.done) attempt([&] { deadline.check(message.peer); });
  }
  if (message.failure) std::rethrow_exception(message.failure);
}

bool Mailbox::wait_until(Message& message, const Patience& patience, const Deadline& limit) {
  if (message.done.load(std::memory_order_acquire)) return true;
  constexpr unsigned rounds_per_look_at_the_clock = 256;
  std::unique_lock lock(mutex_);
  const Waiter waiter(*this, lock);
  int idle = 0;  // rounds since something moved
  for (unsigned round = 1; !message.done.load(std::memory_order_acquire); ++round) {
    idle = progress() ? 0 : idle + 1;
    const bool is_patient = idle > patience.spins + patience.yields;
    if ((is_patient || round % rounds_per_look_at_the_clock == 0) && limit.has_passed()) return false;
    if (idle == 0) continue;
    if (is_patient) sleep(lock, 0.005);
    lock.unlock();
    if (is_patient) {
      run_signal_handlers();
    } else if (idle < patience.spins) {
      pause_briefly();
    } else {
      sched_yield();
    }
    lock.lock();
  }
  return true;
}

void Mailbox::wake() {
  if (peers_.doorbell != nullptr) {
    peers_.doorbell->value.fetch_add(1, std::memory_order_seq_cst);
    peers_.doorbell->wake();
  }
  changed_.notify_all();
}

// Until a peer rings, or a socket is ready, at most so long. The lock is given up meanwhile.
void Mailbox::sleep(std::unique_lock<std::mutex>& lock, double seconds) {
  std::vector<pollfd> fds;
  for (int peer = 0; peer < peers_.size; ++peer) {
    const bool is_sending = !outgoing_[static_cast<size_t>(peer)].empty();
    if (Link* link = peers_.links.find(peer)) link->append_poll(fds, is_sending, true);
  }
  const uint32_t seen = peers_.doorbell != nullptr ? peers_.doorbell->value.load() : 0;
  if (progress()) return;  // something came while this thread was getting ready
  lock.unlock();
  if (peers_.doorbell != nullptr && fds.empty()) {
    peers_.doorbell->sleep(seen, seconds);
  } else {
    poll(fds.data(), fds.size(), peers_.doorbell != nullptr ? 1 : static_cast<int>(1000 * seconds));
  }
  lock.lock();
}

// Has the thread go on with what is pending, unless somebody waits and so does it himself. Who posts a message
// mostly waits for it at once: while messages come and go the thread looks by itself now and then, and is only woken
// for what does not fit its link.
void Mailbox::leave_to_thread() {
  if (!is_left()) return;
  is_in_use_ = true;
  if (!thread_.joinable()) thread_ = start_quiet_thread([this] { run(); });
  const auto is_unsent = [](const auto& queue) { return !queue.empty(); };
  if (is_resting_ || std::any_of(outgoing_.begin(), outgoing_.end(), is_unsent)) changed_.notify_all();
}

void Mailbox::run() {
  using std::chrono::microseconds;
  constexpr microseconds shortest{500}, longest{8000};
  pthread_setname_np(pthread_self(), "shoal-mailbox");
  std::unique_lock lock(mutex_);
  for (microseconds pause = shortest; !stopped_;) {
    if (is_left()) {
      if (progress()) {
        pause = shortest;
      } else {
        sleep(lock, 0.02);
      }
      continue;
    }
    if (pause < longest || is_in_use_) {
      is_in_use_ = false;
      changed_.wait_for(lock, pause);
      pause = std::min(2 * pause, longest);
    } else {
      is_resting_ = true;
      changed_.wait(lock);
      is_resting_ = false;
      pause = shortest;
    }
  }
}

}  // namespace shoal
