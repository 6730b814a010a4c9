// A waiting thread, or the mailbox's thread, reads offered messages and large early messages without the lock. During
// the read the message belongs to the reading thread: only that thread may finish it or fail it.

#include <algorithm>
#include <cstring>
#include <utility>

#include "algorithms/mailbox.h"

namespace shoal {

// Reads a piece of an offered message, or of a large early message, without the lock, and returns the number of bytes.
// 0 if there is no such message, apart from those that another thread reads or that have more than `most_bytes` left.
size_t Mailbox::read_offered(std::unique_lock<std::mutex>& lock, size_t most_bytes) {
  if (readings_ == 0 || broken_) return 0;
  const auto is_for_this_thread = [&](const Correspondent& from) {
    if (from.readings.empty() || from.is_being_read) return false;
    const Arrival& next = from.readings.front();
    return next.header.bytes - next.done <= most_bytes;
  };
  int peer = 0;
  while (peer < peers_.size && !is_for_this_thread(with(peer))) ++peer;
  if (peer == peers_.size) return 0;

  Correspondent& from = with(peer);
  Arrival& arrival = from.readings.front();
  const size_t bytes = std::min(reading_bytes, arrival.header.bytes - arrival.done);
  std::byte* const to = arrival.to() + arrival.done;
  std::exception_ptr failure;
  from.is_being_read = true;
  lock.unlock();
  try {
    if (arrival.source) {
      std::memcpy(to, arrival.source.get() + arrival.done, bytes);
    } else {
      peers_.read(peer, arrival.header.offered, arrival.done, bytes, to);
    }
  } catch (...) {
    failure = std::current_exception();
  }
  lock.lock();
  from.is_being_read = false;
  arrival.done += bytes;
  if (broken_) {
    fail_pending();
    answer_if_heard(peer);
  } else if (failure && (arrival.source || peers_.is_open(peer))) {
    fail_all(failure);
  } else if (failure || arrival.done == arrival.header.bytes) {
    end_reading(peer, failure == nullptr);
    attempt([&] { serve(peer, serving_bytes); });
  }
  read_.notify_all();
  return bytes;
}

// A message was read, or cannot be read because its sender has left.
void Mailbox::end_reading(int peer, bool is_read) {
  Correspondent& from = with(peer);
  const Arrival arrival = std::move(from.readings.front());
  from.readings.pop_front();
  --readings_;
  const bool is_kept_here = arrival.source != nullptr;
  // The application's memory holds the sent bytes only as long as the sender has not left.
  const bool is_sound = is_read && (is_kept_here || arrival.header.is_copy || peers_.is_open(peer));
  if (arrival.message) {
    if (is_sound) {
      finish(*arrival.message);
    } else {
      fail(*arrival.message, left(peer));
    }
  } else {
    arrival.early->is_complete = is_sound;
    if (!is_sound) arrival.early->bytes = nullptr;
    if (const auto message = arrival.early->wanted_by) {
      if (is_sound) {
        deliver(arrival.early);
      } else {
        early_.erase(arrival.early);
        fail(*message, left(peer));
      }
    }
  }
  if (!is_kept_here) answer(peer, Header::Kind::taken, arrival.header.number);
  answer_if_heard(peer);
}

}  // namespace shoal
