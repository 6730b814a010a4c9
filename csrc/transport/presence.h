// A mark in shared memory that the system withdraws when the thread that holds it ends, however it ends.
//
// The end of a process shows in its pidfd and its connections only after its memory was given back, at some
// quarter of a second per gigabyte; this shows at once. It is a robust mutex, which nobody ever waits for.
#pragma once

#include <pthread.h>

namespace shoal {

class Presence {
 public:
  Presence();
  Presence(const Presence&) = delete;
  Presence& operator=(const Presence&) = delete;

  // By one thread; it releases it before it ends, and before the memory is unmapped.
  void hold();
  void release();

  // Whether the thread that held it ended without releasing it. From any process.
  bool is_lost();

 private:
  pthread_mutex_t mutex_;
};

}  // namespace shoal
