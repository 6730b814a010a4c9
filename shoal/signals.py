"""Signals that ask a run to end, and how they are kept from processes that a launcher or a rank starts.

A signal may reach every process of a run: a service manager, a container's runtime and srun send it to all.
The launcher and the ranks answer it: ranks finish their step and save. For that they need their other
processes, such as the one that ranks are forked from, those that prepare data, and compilers. These must
outlive it. They end when their input is closed, when their parent ends, or by SIGKILL.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import final

__all__ = [
    "ANSWERED",
    "STOPS",
    "EarlyEnd",
    "end_early",
    "ignore_signals_at_exit",
    "keep_exit_codes",
    "obey_parent_alone",
    "stopped_early",
    "take_signals",
    "withheld_from_children",
    "withhold_signals",
]

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Signals that ask to finish the step, save and end."""

ANSWERED = frozenset({*STOPS, signal.SIGUSR2})
"""Signals that launchers and ranks answer; SIGUSR2 asks for a profile."""


@contextlib.contextmanager
def withheld_from_children() -> Iterator[None]:
    """Keep signals from the processes that this thread starts within this context, from their first moment.

    The signals are blocked, and a process inherits that, over `exec` too. This process gets those that came
    meanwhile at the end of the context.
    """
    before = withhold_signals()
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def withhold_signals() -> set[signal.Signals | int]:
    """Block the signals in this thread, and so in processes that it starts; return what was blocked."""
    return signal.pthread_sigmask(signal.SIG_BLOCK, ANSWERED)


def take_signals() -> None:
    """Take signals that were withheld from this thread, those that came meanwhile too."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ANSWERED)


def keep_exit_codes() -> None:
    """Let the system keep the exit codes of this process's children.

    It does not where the program that started this one ignores the end of its own children (SIGCHLD), which
    is inherited.
    """
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def obey_parent_alone() -> None:
    """In a process that signals are kept from, end at a SIGTERM of its parent, and at no other one.

    It is for processes that a library ends by SIGTERM.
    """

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
            pass
        os._exit(0)

    parent = os.getppid()
    threading.Thread(target=wait, name="shoal-parent", daemon=True).start()


def stopped_early(name: str) -> str:
    """Return what is told where a signal of this name ends a training that has made no step."""
    return f"shoal: stopped by {name} before the first step: no step is lost"


@final
class EarlyEnd:
    """Ends this program at a signal, until ranks have begun, and does nothing after that.

    Args:
        code: Exit code.

    Attributes:
        has_begun: Whether ranks have begun, or the end has.
    """

    def __init__(self, code: int) -> None:
        self._code = code
        self.has_begun = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Say that no step is lost, and leave the program."""
        if not self.has_begun:
            self.has_begun = True  # the same signal may come again, from a launcher that passes it on
            print(stopped_early(signal.Signals(number).name), file=sys.stderr, flush=True)
            raise SystemExit(self._code)


def end_early(code: int) -> None:
    """Let a signal end this program with an exit code, until others take the signals.

    A launcher takes them while there are ranks, and sets `EarlyEnd.has_begun`; a rank takes them for good.
    They come also where the program that started this one had blocked them, which is inherited.
    """
    ignore_signals_at_exit()
    end = EarlyEnd(code)
    for number in STOPS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, end)
    take_signals()


def ignore_signals_at_exit() -> None:
    """Let no signal replace the exit code of this process while the interpreter ends it.

    The interpreter gives each signal with a handler its default action back before it destroys modules. To
    destroy torch may take a second, in which a second SIGTERM would end a run that is saved with 143.
    """
    atexit.unregister(_ignore_signals)
    atexit.register(_ignore_signals)


def _ignore_signals() -> None:
    for number in ANSWERED:
        signal.signal(number, signal.SIG_IGN)
