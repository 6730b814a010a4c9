// Threads that wait for messages, and the mailbox's thread, which moves them while no thread waits.

#include <poll.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include "algorithms/mailbox.h"
#include "common/interruption.h"
#include "common/quiet_thread.h"

namespace shoal {

// While there is a waiter, the mailbox's own thread has nothing to do. Made and destroyed with the lock held.
class Mailbox::Waiter {
 public:
  Waiter(Mailbox& mailbox, std::unique_lock<std::mutex>& lock) : mailbox_(mailbox), lock_(lock) {
    ++mailbox_.waiters_;
  }
  ~Waiter() {
    if (!lock_.owns_lock()) lock_.lock();
    --mailbox_.waiters_;
    mailbox_.leave_to_thread(mailbox_.readings_ > 0);
  }
  Waiter(const Waiter&) = delete;

 private:
  Mailbox& mailbox_;
  std::unique_lock<std::mutex>& lock_;
};

void Mailbox::wait(Message& message, const Patience& patience, const Deadline& deadline) {
  if (!wait_until(message, patience, deadline)) {
    // Ends the other messages too, so that nothing writes to this message's memory any more.
    std::unique_lock lock(mutex_);
    if (!message.done) attempt([&] { deadline.check(message.peer); });
    read_.wait(lock, [&] { return message.done.load(); });  // until the reading thread has stopped
  }
  if (message.failure) std::rethrow_exception(message.failure);
}

bool Mailbox::wait_until(Message& message, const Patience& patience, const Deadline& limit) {
  if (message.done.load(std::memory_order_acquire)) return true;
  constexpr unsigned rounds_per_look_at_the_clock = 256;
  std::unique_lock lock(mutex_);
  const Waiter waiter(*this, lock);
  note_private_memory(lock);
  int idle = 0;  // rounds since something moved
  for (unsigned round = 1; !message.done.load(std::memory_order_acquire); ++round) {
    bool moved = progress();
    if (!message.done.load(std::memory_order_relaxed)) moved |= read_offered(lock) > 0;
    idle = moved ? 0 : idle + 1;
    const bool is_patient = idle > patience.spins + patience.yields;
    if ((is_patient || round % rounds_per_look_at_the_clock == 0) && limit.has_passed()) return false;
    give_way(lock);
    if (idle == 0) continue;
    if (is_patient || is_being_read(message)) sleep(lock, 0.005);
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
  // Work that takes no longer than waking the mailbox's thread, which would also take a core from another thread.
  for (size_t left = serving_bytes, read = 1; read > 0; left -= read) read = read_offered(lock, left);
  return true;
}

void Mailbox::wake() {
  if (peers_.doorbell != nullptr) {
    peers_.doorbell->value.fetch_add(1, std::memory_order_seq_cst);
    peers_.doorbell->wake();
  }
  changed_.notify_all();
}

// Gives way to threads that post messages.
void Mailbox::give_way(std::unique_lock<std::mutex>& lock) {
  if (!somebody_posts()) return;
  lock.unlock();
  constexpr int most_yields = 1000;
  for (int yield = 0; yield < most_yields && somebody_posts(); ++yield) sched_yield();
  lock.lock();
}

// This may take as long as a copy, so a thread that posts does not do it. Releases the lock meanwhile.
void Mailbox::note_private_memory(std::unique_lock<std::mutex>& lock) {
  while (!not_noted_.empty()) {
    const std::shared_ptr<Message> message = not_noted_.front().lock();
    not_noted_.pop_front();
    if (!message || message->done) continue;
    lock.unlock();
    peers_.note(message->data, message->bytes);
    lock.lock();
  }
}

// Whether a thread reads it now.
bool Mailbox::is_being_read(const Message& message) const {
  return readings_ > 0 && std::any_of(correspondents_.begin(), correspondents_.end(), [&](const Correspondent& each) {
    return each.is_being_read && each.readings.front().message.get() == &message;
  });
}

// Sleeps until a peer rings or a socket is ready, at most `seconds`. Releases the lock meanwhile.
void Mailbox::sleep(std::unique_lock<std::mutex>& lock, double seconds) {
  if (readings_ > 0) {  // another thread reads: it signals after each piece
    read_.wait_for(lock, std::chrono::milliseconds(1));
    return;
  }
  std::vector<pollfd> fds;
  for (const Correspondent& each : correspondents_) {
    const bool is_sending = !each.frames.empty() || !each.contents.empty();
    if (each.link != nullptr && !each.is_closed) each.link->append_poll(fds, is_sending, true);
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

// Lets the mailbox's thread continue with pending messages, unless another thread waits and does it. A thread that
// posts a message mostly waits for it at once: while messages come and go, the mailbox's thread checks by itself now
// and then. It is woken only for messages that do not fit their link or need attention.
void Mailbox::leave_to_thread(bool at_once) {
  if (!is_left()) return;
  is_in_use_ = true;
  if (!thread_.joinable()) thread_ = start_quiet_thread([this] { run(); });
  if (at_once || is_resting_ || frames_ > 0) changed_.notify_all();
}

void Mailbox::run() {
  using std::chrono::microseconds;
  constexpr microseconds shortest{500}, longest{8000};
  pthread_setname_np(pthread_self(), "shoal-mailbox");
  std::unique_lock lock(mutex_);
  for (microseconds pause = shortest; !stopped_;) {
    if (is_left()) {
      note_private_memory(lock);
      bool moved = progress();
      moved |= read_offered(lock) > 0;
      if (moved) {
        pause = shortest;
        give_way(lock);
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
