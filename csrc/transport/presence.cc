#include "transport/presence.h"

#include <cerrno>

namespace shoal {

Presence::Presence() {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&mutex_, &attributes);
  pthread_mutexattr_destroy(&attributes);
}

void Presence::hold() { pthread_mutex_lock(&mutex_); }

void Presence::release() { pthread_mutex_unlock(&mutex_); }

bool Presence::is_lost() {
  switch (pthread_mutex_trylock(&mutex_)) {
    case 0:  // no thread holds it
      pthread_mutex_unlock(&mutex_);
      return false;
    case EOWNERDEAD:
      // Released without being made consistent, it reports the loss to all later attempts.
      pthread_mutex_unlock(&mutex_);
      return true;
    case ENOTRECOVERABLE:
      return true;
    default:  // it is held
      return false;
  }
}

}  // namespace shoal
