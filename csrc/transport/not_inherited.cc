#include "transport/not_inherited.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <mutex>
#include <set>

namespace shoal {

namespace {

// One for the process, as forking is the process's. It is never destroyed: a fork may come at any time.
class Registry {
 public:
  static Registry& instance() {
    static auto* registry = new Registry;
    return *registry;
  }

  void add(int descriptor) {
    std::lock_guard lock(mutex_);
    descriptors_.insert(descriptor);
  }

  void remove(int descriptor) {
    std::lock_guard lock(mutex_);
    descriptors_.erase(descriptor);
  }

 private:
  // The lock is held during the fork, so that other threads do not change the data that the child reads.
  Registry() {
    pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                   [] { instance().leave_to_parent(); });
  }

  // In the child, where only system calls are safe.
  void leave_to_parent() {
    const int nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
    for (int descriptor : descriptors_) {
      if (nothing >= 0) dup3(nothing, descriptor, O_CLOEXEC);
    }
    if (nothing >= 0) close(nothing);
    mutex_.unlock();
  }

  std::mutex mutex_;
  std::set<int> descriptors_;
};

}  // namespace

NotInherited::NotInherited(int descriptor) : descriptor_(descriptor) {
  Registry::instance().add(descriptor_);
}

NotInherited::~NotInherited() { Registry::instance().remove(descriptor_); }

}  // namespace shoal
