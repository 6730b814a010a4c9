// The mailbox's lock, for threads that must not wait long. Threads that wait for a message, and the mailbox's own
// thread, take it again and again, and a mutex is not fair: so they check whether another thread posts, and give way.
#pragma once

#include "algorithms/mailbox.h"

namespace shoal {

class Mailbox::Posting {
 public:
  explicit Posting(Mailbox& mailbox) : lock_(mailbox.mutex_, std::defer_lock) {
    mailbox.posting_.fetch_add(1, std::memory_order_relaxed);
    lock_.lock();
    mailbox.posting_.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  std::unique_lock<std::mutex> lock_;
};

}  // namespace shoal
