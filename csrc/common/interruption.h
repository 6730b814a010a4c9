// Runs the application's signal handlers while one of its threads waits in the core.
//
// Python runs its signal handlers between two of its instructions, in its main thread; while that thread waits here,
// Python runs none. So a waiting thread runs the handlers from time to time. A handler may raise an exception, as the
// handler of Ctrl-C does: then the wait ends, and the exception is kept until the thread is back in Python.
#pragma once

#include <exception>

namespace shoal {

// Thrown by a wait during which a signal handler raised.
class Interrupted : public std::exception {
 public:
  const char* what() const noexcept override { return "a signal interrupted it"; }
};

// Runs the handlers of arrived signals, at most every tenth of a second. Outside of the main thread, and without
// Python, it does nothing. It takes the interpreter's lock: the caller must hold no other lock. Throws Interrupted.
void run_signal_handlers();

// Whether a handler raised an exception on this thread that was not taken yet.
bool was_interrupted();

// Hands the raised exception to the interpreter, whose lock is held.
void take_interruption();

}  // namespace shoal
