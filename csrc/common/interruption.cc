#include "common/interruption.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>

// From Python's stable interface; null if Python did not load this library.
extern "C" {
struct _object;
__attribute__((weak)) int PyGILState_Ensure();
__attribute__((weak)) void PyGILState_Release(int);
__attribute__((weak)) int PyErr_CheckSignals();
__attribute__((weak)) void PyErr_Fetch(_object** type, _object** value, _object** trace);
__attribute__((weak)) void PyErr_Restore(_object* type, _object* value, _object* trace);
}

namespace shoal {

namespace {

// If another thread computes in Python, its lock takes 5 ms to get: do not ask for it often.
constexpr std::chrono::milliseconds pause{100};

struct Raised {
  _object* type = nullptr;
  _object* value = nullptr;
  _object* trace = nullptr;
};
thread_local Raised raised;
thread_local std::chrono::steady_clock::time_point last_run;

bool is_main_thread() {
  thread_local const bool is_main = syscall(SYS_gettid) == getpid();
  return is_main;
}

}  // namespace

void run_signal_handlers() {
  if (PyErr_CheckSignals == nullptr || !is_main_thread()) return;
  const auto now = std::chrono::steady_clock::now();
  if (now - last_run < pause) return;
  last_run = now;
  const int state = PyGILState_Ensure();
  if (PyErr_CheckSignals() != 0) PyErr_Fetch(&raised.type, &raised.value, &raised.trace);
  PyGILState_Release(state);
  if (was_interrupted()) throw Interrupted();
}

bool was_interrupted() { return raised.type != nullptr; }

void take_interruption() {
  PyErr_Restore(raised.type, raised.value, raised.trace);
  raised = {};
}

}  // namespace shoal
