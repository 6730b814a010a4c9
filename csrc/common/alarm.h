// Why a group can no longer communicate. Raised once, from any thread; read by all waiting threads.
#pragma once

#include <atomic>
#include <mutex>
#include <string>

#include "common/error.h"

namespace shoal {

class Alarm {
 public:
  // The first call wins; true for that one.
  bool raise(Code code, int rank, const std::string& text) {
    std::lock_guard lock(mutex_);
    if (raised_.load(std::memory_order_relaxed)) return false;
    code_ = code, rank_ = rank, text_ = text;
    raised_.store(true, std::memory_order_release);
    return true;
  }

  bool is_raised() const noexcept { return raised_.load(std::memory_order_acquire); }

  // Throws the raised failure, if there is one.
  void check() const {
    if (is_raised()) throw Failure(code_, rank_, text_);
  }

 private:
  std::mutex mutex_;
  std::atomic<bool> raised_{false};
  Code code_ = Code::ok;
  int rank_ = -1;
  std::string text_;
};

}  // namespace shoal
