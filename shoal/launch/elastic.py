"""Starts ranks on this machine that may be lost, and replaced, while the others train.

A member that fails is lost: the others form a new generation and go on, if enough are left. Meanwhile it is
started again, and joins in a later generation. See `shoal.launch.membership`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from torch.distributed.distributed_c10d import Store

from shoal.errors import WorkerError
from shoal.launch.ended import exit_code_after_signal
from shoal.launch.launcher import (
    END,
    SETTLE,
    listen_for,
    rank_environments,
    store_on_loopback,
)
from shoal.launch.local_ranks import LocalRanks
from shoal.launch.membership import AFTER, MEMBER, Roster
from shoal.launch.nursery import Nursery
from shoal.launch.outcome import EXIT_STOPPED, Outcome, root_cause
from shoal.launch.stopping import StopRequest, signals_noted

__all__ = ["Elasticity", "launch_elastic"]

_LOOK = 0.02  # seconds between checks for ended ranks
_STOPPED = 10.0  # seconds after which a process that is stopped counts as lost
_SOON = 60.0  # seconds: a member that fails sooner after its start than this is left out the second time
_WRONG_INPUT = 2  # exit code of a rank that was given what cannot work


@dataclass(frozen=True, slots=True)
class Elasticity:
    """How many members a training may lose.

    Attributes:
        least: Number of members with which it goes on.
        restarts: Number of times that lost members are started again, in total.
    """

    least: int
    restarts: int


def launch_elastic(
    command: Sequence[str],
    most: int,
    elasticity: Elasticity,
    environment: Mapping[str, str] = os.environ,
    *,
    logs: Path | None = None,
    events: Path | None = None,
    nursery: Nursery | None = None,
    grace: float | None = None,
) -> int:
    """Run a command as each of some members, of which some may be lost; otherwise like `launch`.

    SIGTERM to a member's process alone asks that member to leave: the others go on without it.

    Args:
        command: A program and its arguments, as for `launch`.
        most: Number of members to start.
        elasticity: How many may be lost.
        environment: Environment of the members, beside what torchrun gives them.
        logs: Directory in which each member's output is kept, once the directory exists.
        events: JSON lines that tell which members were lost, left and came, and when; None for none. It is
            written once its folder exists.
        nursery: The Nursery that members are forked from; None to start a program for each.
        grace: Seconds from a signal until the system ends this process; None if it does not.

    Returns:
        The exit code: 0, or `EXIT_STOPPED` after a signal if the state is saved.

    Raises:
        WorkerError: Too few members are left, or one failed because of wrong input; the error is that of the
            member that failed last, or first in the same moment.
    """
    with (
        tempfile.TemporaryDirectory(prefix="shoal-") as folder,
        store_on_loopback() as store,
        signals_noted() as signals,
    ):
        environments = {
            member: {**each, MEMBER: str(member), AFTER: "-1"}
            for member, each in rank_environments(
                folder, range(most), most, store.port, environment, nursery
            ).items()
        }
        with LocalRanks(command, environments, logs, nursery) as processes:
            stop = StopRequest(signals, grace)
            return _Members(processes, store, Path(folder), elasticity, most, events).run(stop)


@final
class _Members:
    """The members of a training on this machine, watched by the launcher."""

    def __init__(
        self,
        processes: LocalRanks,
        store: Store,
        folder: Path,
        elasticity: Elasticity,
        most: int,
        events: Path | None,
    ) -> None:
        self._processes = processes
        self._roster = Roster(store)
        self._folder = folder
        self._events = events
        self._least = elasticity.least
        self._restarts = elasticity.restarts
        self._present = list(range(most))
        self._starting: set[int] = set()
        self._ended: set[int] = set()  # members whose end was noted since they were started
        self._started = dict.fromkeys(self._present, time.monotonic())
        self._early: set[int] = set()  # members that have failed soon after a start
        self._stopped_since: dict[int, float] = {}
        self._signal: signal.Signals | None = None
        self._failure: WorkerError | None = None

    def run(self, stop: StopRequest) -> int:
        """Watch until the training has ended; return its exit code."""
        self._roster.announce(self._present, is_broken=False)
        while self._processes.running() and not stop.is_late:
            self._processes.listen(_LOOK)
            stop.pass_on(self._processes)
            self._signal = stop.signal
            self._end_stopped()
            if not self._note_ends():
                break
            self._take_ready()
        if stop.is_now:
            self._processes.end()
        return self._exit_code()

    def _note_ends(self) -> bool:
        """Take note of members that have ended; return whether the training goes on."""
        codes = {
            member: code for member, code in self._processes.exit_codes().items() if member not in self._ended
        }
        if not codes:
            return True
        if 0 in codes.values():  # all steps are made
            listen_for(self._processes, END)
            return False
        failed = {member: code for member, code in codes.items() if code != EXIT_STOPPED}
        if failed and self._signal is None:
            time.sleep(_LOOK)  # the outcome of another that failed first may be on its way
        self._ended.update(codes)
        was_present = set(codes).intersection(self._present)
        self._present = [member for member in self._present if member not in codes]
        self._starting.difference_update(codes)
        if self._signal is not None:
            if failed:
                self._failure = self._why(failed)
            return not failed
        if failed:
            self._failure = self._why(failed)
            if _WRONG_INPUT in failed.values():
                return False
            left = len(self._present)
            print(f"shoal: {self._failure}; {left} go on, if they can", file=sys.stderr, flush=True)
            self._note("lost", failed, str(self._failure))
            self._start_again(failed)
        else:
            self._note("left", codes)
        if len(self._present) + len(self._starting) < self._least or not (self._present or self._starting):
            return False
        if was_present and len(self._present) >= self._least:
            self._roster.announce(self._present, is_broken=bool(failed))
        return True

    def _start_again(self, failed: Mapping[int, int]) -> None:
        for member in failed:
            is_early = time.monotonic() - self._started[member] < _SOON
            if self._restarts == 0 or (is_early and member in self._early):
                continue
            self._restarts -= 1
            if is_early:
                self._early.add(member)
            self._roster.expect(member)
            for outcome in self._folder.glob(f"rank-{member:05d}.json"):
                outcome.unlink()
            self._processes.start_again(member, {AFTER: str(self._roster.newest)})
            self._ended.discard(member)
            self._starting.add(member)
            self._started[member] = time.monotonic()

    def _take_ready(self) -> None:
        """Make a generation with members that have come, if any."""
        ready = {member for member in self._starting if self._roster.is_ready(member)}
        if not ready or self._signal is not None:
            return
        self._starting -= ready
        was_enough = len(self._present) >= self._least
        self._present = sorted([*self._present, *ready])
        if len(self._present) >= self._least:
            self._roster.announce(self._present, is_broken=not was_enough)
            print(f"shoal: {_named(ready)}; now there are {len(self._present)}", file=sys.stderr, flush=True)
            self._note("came", ready)

    def _note(self, event: str, members: Iterable[int], reason: str = "") -> None:
        """Append an event to the file of events. A full disk loses it, and stops nothing."""
        if self._events is None or not self._events.parent.is_dir():
            return
        told = {"time": time.time(), "event": event, "members": sorted(members), "present": self._present}
        with contextlib.suppress(OSError), self._events.open("a") as file:
            file.write(json.dumps({**told, "reason": reason} if reason else told) + "\n")

    def _end_stopped(self) -> None:
        """End processes that were stopped for long: they hold up all others."""
        stopped = self._processes.stopped()
        now = time.monotonic()
        self._stopped_since = {member: self._stopped_since.get(member, now) for member in stopped}
        for member, since in self._stopped_since.items():
            if now - since > _STOPPED:
                self._processes.signal(signal.SIGKILL, [member])

    def _why(self, failed: Mapping[int, int]) -> WorkerError:
        outcomes = [outcome for outcome in Outcome.read_all(self._folder) if outcome.rank in failed]
        return root_cause(outcomes, failed)

    def _exit_code(self) -> int:
        """End what is left, and return the exit code of the training."""
        if self._failure is not None and self._processes.running():
            listen_for(self._processes, SETTLE)
        self._processes.signal(signal.SIGTERM)
        listen_for(self._processes, END)
        codes = self._processes.exit_codes()
        if 0 in codes.values():
            return 0
        if self._signal is not None:
            if self._failure is not None:
                raise self._failure
            members = [member for member in codes if codes[member] == EXIT_STOPPED] or list(codes)
            outcomes = [each for each in Outcome.read_all(self._folder) if each.rank in members]
            return exit_code_after_signal(outcomes, members, self._signal.name)
        if self._failure is None:  # the last members were asked to leave, one by one
            return EXIT_STOPPED
        raise self._failure


def _named(members: set[int]) -> str:
    numbers = ", ".join(map(str, sorted(members)))
    return f"rank {numbers} is there again" if len(members) == 1 else f"ranks {numbers} are there again"
