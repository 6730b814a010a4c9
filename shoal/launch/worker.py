"""Runs the work of a rank: ends with its launcher, obeys signals, and writes an outcome."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from shoal.errors import UserError
from shoal.launch.kernel import die_with, name_process
from shoal.launch.launcher import LAUNCHER, OUTCOMES
from shoal.launch.outcome import Outcome

__all__ = ["StopSignal", "run_rank"]


_ASK = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # signals that ask to finish the step and save
_OF_GRACE = 0.9  # share of the grace after which a process that has not saved ends; the rest is for its end
_NOT_SAVED = 130  # exit code of a process that was stopped before it saved


class StopSignal:
    """Knows whether SIGTERM, SIGUSR1 or Ctrl-C asked this process to stop; Ctrl-C after that ends it at once.

    Until `heed` is called there is nothing to save, and a signal ends the process. This works even where it
    waits for missing ranks in native code, which no Python handler interrupts.

    Args:
        grace: Seconds from a signal until the system ends this process. Shortly before, this process says
            that it could not save, and ends itself. None if the system does not end it.
    """

    def __init__(self, grace: float | None = None) -> None:
        self.received: signal.Signals | None = None
        self._grace = grace
        for number in _ASK:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # until there are steps that it asks to profile

    def heed(self) -> None:
        """Only record signals from now on; the work checks `received`."""
        for number in _ASK:
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            os._exit(_NOT_SAVED)
        if self.received is None and self._grace is not None:
            timer = threading.Timer(_OF_GRACE * self._grace, self._give_up)
            timer.daemon = True
            timer.start()
        self.received = signal.Signals(number)

    def _give_up(self) -> None:
        assert self.received is not None
        print(
            f"shoal: ended by {self.received.name}: the step and the save took longer than the grace of "
            f"{self._grace:g} s",
            file=sys.stderr,
            flush=True,
        )
        os._exit(_NOT_SAVED)


def run_rank(rank: int, work: Callable[[StopSignal], int], *, grace: float | None = None) -> int:
    """Do the work of one rank and report how it ended.

    Under `shoal`'s own launcher, the launcher reports the outcome that this writes. Under another launcher
    this prints the outcome, and writes it to the error file that torchelastic asks for.

    Args:
        rank: The global rank.
        work: Function that does the work and returns the exit code.
        grace: Seconds from a signal until the system ends this process; None if it does not.

    Returns:
        The exit code of the process.
    """
    folder = os.environ.get(OUTCOMES)
    name_process(f"shoal-rank-{rank}")
    if folder is not None:
        die_with(int(os.environ[LAUNCHER]))
    try:
        outcome = Outcome(rank=rank, exit_code=work(StopSignal(grace)))
    except BaseException as error:
        outcome = Outcome.of_error(rank, error)
        if folder is None:
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            if not isinstance(error, UserError):  # torchrun would print the traceback too
                get_error_handler().record_exception(error)
            _tell(outcome, error)
    if folder is not None:
        outcome.write(Path(folder))
    return outcome.exit_code


def _tell(outcome: Outcome, error: BaseException) -> None:
    text = str(error) if isinstance(error, UserError) else outcome.error
    print(f"shoal: rank {outcome.rank} failed: {text}", file=sys.stderr)
    if outcome.detail:
        print(outcome.detail, file=sys.stderr)
