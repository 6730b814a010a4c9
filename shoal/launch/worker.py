"""Runs the work of a rank: ends with its launcher, obeys signals, and writes an outcome."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from shoal.errors import UserError
from shoal.launch.kernel import die_with, name_process
from shoal.launch.launcher import LAUNCHER, OUTCOMES
from shoal.launch.outcome import Outcome

__all__ = ["StopSignal", "run_rank"]


class StopSignal:
    """Knows whether SIGTERM or Ctrl-C asked this process to stop; a second Ctrl-C ends it at once.

    Until `heed` is called there is nothing to save, and a signal ends the process. This works even where it
    waits for missing ranks in native code, which no Python handler interrupts.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # until there are steps that it asks to profile

    def heed(self) -> None:
        """Only record signals from now on; the work checks `received`."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            os._exit(128 + number)
        self.received = signal.Signals(number)


def run_rank(rank: int, work: Callable[[StopSignal], int]) -> int:
    """Do the work of one rank and report how it ended.

    Under `shoal`'s own launcher, the launcher reports the outcome that this writes. Under another launcher
    this prints the outcome, and writes it to the error file that torchelastic asks for.

    Args:
        rank: The global rank.
        work: Function that does the work and returns the exit code.

    Returns:
        The exit code of the process.
    """
    folder = os.environ.get(OUTCOMES)
    name_process(f"shoal rank {rank}")
    if folder is not None:
        die_with(int(os.environ[LAUNCHER]))
    try:
        outcome = Outcome(rank=rank, exit_code=work(StopSignal()))
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
