// A mark in shared memory that the system withdraws when the thread that holds it ends, however it ends.
//
// The end of a process shows in its pidfd and its connections only after its memory was freed, which takes about a
// quarter of a second per gigabyte; this mark shows it at once. It is a robust mutex for which no thread ever waits.
#pragma once

#include <pthread.h>

namespace shoal {

class Presence {
 public:
  Presence();
  Presence(const Presence&) = delete;
  Presence& operator=(const Presence&) = delete;

  // Called by one thread, which releases it before it ends, and before the memory is unmapped.
  void hold();
  void release();

  // Whether the thread that held it ended without releasing it. From any process.
  bool is_lost();

 private:
  pthread_mutex_t mutex_;
};

}  // namespace shoal
