// A file descriptor that is closed with its owner.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <utility>

namespace shoal {

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor() {
    if (number_ >= 0) close(number_);
  }

  int number() const { return number_; }
  explicit operator bool() const { return number_ >= 0; }

 private:
  int number_ = -1;
};

// How many descriptors this process may have open: the soft limit of RLIMIT_NOFILE.
size_t descriptor_limit();

// Raises that limit to the hard one, to 65,536 at most: programs that a rank starts inherit it, and some of them go
// through all numbers below it. Never lowers it.
void raise_descriptor_limit();

}  // namespace shoal
