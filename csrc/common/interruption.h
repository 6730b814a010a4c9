// The application's signals, while a thread of it waits in here.
//
// Python runs its signal handlers between two of its instructions, in its main thread; while that one waits
// here, it executes none. So who waits has them run from time to time. A handler may raise, as that of
// Ctrl-C does: then the wait ends, and what was raised is kept until the thread is back in Python.
#pragma once

#include <exception>

namespace shoal {

// Thrown by a wait during which a signal handler raised.
class Interrupted : public std::exception {
 public:
  const char* what() const noexcept override { return "a signal interrupted it"; }
};

// Runs the handlers of the signals that came, every tenth of a second at most; on other threads than the
// main one, and where there is no Python, it does nothing. It takes the interpreter's lock: to be called
// without any other. Throws Interrupted.
void run_signal_handlers();

// Whether a handler raised on this thread, and nobody took what it raised yet.
bool was_interrupted();

// Hands what was raised to the interpreter, whose lock is held.
void take_interruption();

}  // namespace shoal
