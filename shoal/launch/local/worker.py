"""Runs the work of a rank: ends with its launcher, obeys signals, and writes an outcome."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from shoal.errors import UserError
from shoal.launch.local.launcher import OUTCOMES
from shoal.launch.local.local_ranks import LAUNCHER
from shoal.launch.local.outcome import Outcome
from shoal.launch.local.prctl import die_with, name_process
from shoal.launch.local.signals import SAME
from shoal.launch.submit import EXIT_STOPPED
from shoal.signals import STOPS, ignore_signals_at_exit, stopped_early, take_signals

_OF_GRACE = 0.9  # share of the grace after which a process that has not saved ends; the rest is for its end
_NOT_SAVED = 130  # exit code of a process that was stopped before it saved


class StopSignal:
    """Knows whether SIGTERM, SIGUSR1, SIGHUP or Ctrl-C asked this process to stop; Ctrl-C after that ends it.

    Until `heed` is called there is nothing to save, and a signal ends the process. This works even where it
    waits for missing ranks in native code, which no Python handler interrupts: the interpreter writes each
    signal into a pipe, from which a thread reads. An ignored SIGHUP stays ignored (nohup).

    Args:
        grace: Seconds from a signal until the system ends this process. Shortly before, this process says
            that it could not save, and ends itself. None if the system does not end it.
        end: Ends this process at a signal while there is nothing to save.
        same: Seconds after a signal in which Ctrl-C tells nothing new.

    Attributes:
        received: The signal that came last; None if none did.
        has_step: Whether the work has made a step, which would be lost; the work sets it.
        is_done: Whether all is made and saved, so that a signal has nothing to ask for; the work sets it.
    """

    def __init__(
        self,
        grace: float | None = None,
        end: Callable[[signal.Signals], object] = lambda number: os._exit(_NOT_SAVED),
        same: float = 0.0,
    ) -> None:
        self.received: signal.Signals | None = None
        self.has_step = self.is_done = False
        self._grace = grace
        self._end = end
        self._same_until, self._same = -math.inf, same
        reading, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        threading.Thread(target=self._watch, args=(reading,), name="shoal-signals", daemon=True).start()
        signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
        for number in STOPS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._receive)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # until there are steps that it asks to profile
        take_signals()

    def heed(self) -> None:
        """Only record signals from now on; the work checks `received`."""
        if self._pipe >= 0:
            signal.set_wakeup_fd(-1)
            os.close(self._pipe)
            self._pipe = -1

    def end_early(self, *, is_lost: bool) -> None:
        """End this process, which has failed, if a signal has come and nothing is lost.

        Args:
            is_lost: Whether another rank is gone, as all are asked to stop; else only what the signal has
                interrupted before `heed` was called may fail.
        """
        if self.received is not None and not self.has_step and (is_lost or self._pipe >= 0):
            self._end(self.received)

    def _watch(self, reading: int) -> None:
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            while told := pipe.read(1):
                if self._pipe >= 0 and told[0] in STOPS:
                    self._end(signal.Signals(told[0]))

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is not None and number == signal.SIGINT and now >= self._same_until:
            os._exit(_NOT_SAVED)
        if self.received is None and self._grace is not None:
            timer = threading.Timer(_OF_GRACE * self._grace, self._give_up)
            timer.daemon = True
            timer.start()
        if self.received is None:
            self._same_until = now + self._same
        self.received = signal.Signals(number)

    def _give_up(self) -> None:
        assert self.received is not None
        if self.is_done:
            return
        print(
            f"shoal: ended by {self.received.name}: the step and the save took longer than the grace of "
            f"{self._grace:g} s",
            file=sys.stderr,
            flush=True,
        )
        os._exit(_NOT_SAVED)


class _AroundFork(threading.local):
    """Gives a process that this one forks the default actions of signals, so that it ends at them.

    Until then no signal may reach it: the handler that it inherits would write into the pipe of this process.
    """

    def begin(self) -> None:
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)

    def end_in_parent(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)

    def end_in_child(self) -> None:
        for number in STOPS:
            if isinstance(getattr(signal.getsignal(number), "__self__", None), StopSignal):
                signal.signal(number, signal.SIG_DFL)
                signal.set_wakeup_fd(-1)
        self.end_in_parent()


_around = _AroundFork()
os.register_at_fork(
    before=_around.begin, after_in_parent=_around.end_in_parent, after_in_child=_around.end_in_child
)


def run_rank(
    rank: int,
    work: Callable[[StopSignal], int],
    *,
    grace: float | None = None,
    early: int = _NOT_SAVED,
) -> int:
    """Do the work of one rank and report how it ended.

    Under `shoal`'s own launcher, the launcher reports the outcome that this writes. Under another launcher
    this prints the outcome, and writes it to the error file that torchelastic asks for.

    Args:
        rank: The global rank.
        work: Function that does the work and returns the exit code.
        grace: Seconds from a signal until the system ends this process; None if it does not.
        early: Exit code of a process that a signal ends before the work heeds it; `EXIT_STOPPED` if the work
            can then begin again without a loss, and the signal is no failure.

    Returns:
        The exit code of the process.
    """
    folder = os.environ.get(OUTCOMES)
    name_process(f"shoal-rank-{rank}")
    if folder is not None:
        die_with(int(os.environ[LAUNCHER]))

    def end(number: signal.Signals) -> None:
        if early == EXIT_STOPPED:
            if folder is not None:  # the launcher knows whether it asked because another rank has failed
                Outcome(rank=rank, exit_code=early, is_early=True).write(Path(folder))
            elif rank == 0:
                print(stopped_early(number.name), file=sys.stderr, flush=True)
        os._exit(early)

    # Shoal's launcher decides what another Ctrl-C means; another one may send what all processes got already.
    stop = StopSignal(grace, end, SAME if folder is None else math.inf)
    ignore_signals_at_exit()
    try:
        outcome = Outcome(rank=rank, exit_code=work(stop))
    except BaseException as error:
        outcome = Outcome.of_error(rank, error)
        stop.end_early(is_lost=outcome.in_collective)
        if folder is None:
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            if not isinstance(error, UserError):  # torchrun would print the traceback too
                get_error_handler().record_exception(error)
            _tell(outcome, error)
    finally:
        stop.heed()
    if folder is not None:
        outcome.write(Path(folder))
    return outcome.exit_code


def _tell(outcome: Outcome, error: BaseException) -> None:
    text = str(error) if isinstance(error, UserError) else outcome.error
    print(f"shoal: rank {outcome.rank} failed: {text}", file=sys.stderr)
    if outcome.detail:
        print(outcome.detail, file=sys.stderr)
