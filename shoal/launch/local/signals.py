"""Signals to a launcher: what is passed on to the ranks, and by when they must have ended."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import final

from shoal.launch.local.local_ranks import Processes
from shoal.signals import ANSWERED, EarlyEnd

SAVE = 600.0  # seconds for ranks to finish their step and save, after a signal, where no grace is given
SAME = 1.0
"""Seconds after Ctrl-C in which another one is taken for the same.

The terminal sends it to a launcher of this process too, such as `uv run` or a script, which may pass it on.
"""

_OF_GRACE = 0.95  # share of the grace that ranks have; the rest is for this process to end
_NOW = 0.5  # seconds for ranks to end after the second Ctrl-C


@final
class StopRequest:
    """Passes signals on to ranks, and knows whether and by when they must have ended.

    SIGTERM, Ctrl-C, SIGUSR1 and a terminal that closes ask the ranks to finish their step and save. Ctrl-C
    after any of them means now; after another Ctrl-C from `SAME` seconds on. Ctrl-Z stops the ranks with this
    process if all are on this host. SIGUSR2 asks for a profile.

    Args:
        signals: The signals that came, to which `signals_noted` appends.
        grace: Seconds after which the system ends this process; None if it does not.
        are_away: Whether no rank is on this host; then the first signal is answered here too.

    Attributes:
        signal: The first signal that asked to end; None if none did.
        deadline: Time on the monotonic clock at which the ranks must have ended.
        is_now: Whether the ranks were asked to end without saving.
    """

    def __init__(
        self, signals: list[signal.Signals], grace: float | None = None, *, are_away: bool = False
    ) -> None:
        self._signals, self._are_away = signals, are_away
        self._seconds = SAVE if grace is None else _OF_GRACE * grace
        self.signal: signal.Signals | None = None
        self.deadline = math.inf
        self.is_now = False
        self._same_until = -math.inf

    @property
    def is_late(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self.deadline

    def pass_on(self, processes: Processes) -> None:
        """Pass the signals that came on to the ranks."""
        while self._signals:
            number = self._signals.pop(0)
            if number == signal.SIGTSTP:
                if self._are_away:
                    _say("Ctrl-Z does not stop a training on several hosts")
                else:
                    _stop_until_continued(processes)
                continue
            if number == signal.SIGUSR2:  # a profile is asked for
                processes.signal(number)
                continue
            # If the terminal closes, training must not be lost.
            processes.signal(signal.SIGTERM if number == signal.SIGHUP else number)
            if self.signal is None:
                now = time.monotonic()
                self.signal, self.deadline = number, now + self._seconds
                self._same_until = now + SAME if number == signal.SIGINT else now
                if self._are_away:
                    _say(f"{number.name}: the ranks finish their step and save; Ctrl-C ends them at once")
            elif number == signal.SIGINT and time.monotonic() >= self._same_until:
                # Ranks in native code do not notice it, so this process must not wait for them.
                self.is_now, self.deadline = True, min(self.deadline, time.monotonic() + _NOW)


def _stop_until_continued(processes: Processes) -> None:
    """Stop the ranks and this process after Ctrl-Z; they continue together.

    The clocks of collectives go on meanwhile.
    """
    _say(
        "stopped. Continue (fg) sooner than `timeout`, 600 s by default: after that the ranks give "
        "each other up, and the run goes on from its last checkpoint with --resume"
    )
    processes.signal(signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
    processes.signal(signal.SIGCONT)


def _say(text: str) -> None:
    print(f"shoal: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def signals_noted() -> Iterator[list[signal.Signals]]:
    """Within this context, append a run's signals to a list; ignored signals stay ignored (nohup)."""
    received: list[signal.Signals] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))

    before = {number: signal.getsignal(number) for number in (*ANSWERED, signal.SIGTSTP)}
    before = {
        number: action
        for number, action in before.items()
        if action != signal.SIG_IGN or number == signal.SIGUSR2  # which asks for a profile, and ends nothing
    }
    for number in before:
        signal.signal(number, note)
    try:
        yield received
    finally:
        for number, action in before.items():
            if isinstance(action, EarlyEnd):
                action.has_begun = True
            signal.signal(number, action)
