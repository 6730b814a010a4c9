"""What ranks tell each other of signals: whether one of them, or all, are asked to stop."""

from __future__ import annotations

import contextlib
import platform
import socket
import sys
import time
from collections.abc import Callable
from typing import final

import torch

from shoal.checkpoint import Coordinator
from shoal.collectives import watch_hangs
from shoal.errors import RunError, ShoalError
from shoal.launch.local import StopSignal, World
from shoal.machine.doctor import HostReport, LiveMachine, Verdict, examine_quickly, facts
from shoal.parallel import Axis
from shoal.spec.run import Run, shown
from shoal.spec.run.writer import Claiming, Writer

_BETWEEN = 1.0  # seconds between two questions
_REACHES = 1.0  # seconds in which a signal to all processes of a run reaches each of them
_LOOK = 0.02  # seconds between two looks


@final
class StopTogether:
    """Lets ranks leave equally many rounds of work after the same one, once a rank is asked to stop.

    They ask each other before the first round, and then about once a second: the answer of a GPU is waited
    for. The number of rounds between two questions follows from times that all ranks know.

    Args:
        ranks: The ranks.
        device: Device on which they tell each other.
        is_asked: Returns whether this rank is asked to stop; None on all ranks if none ever is.
    """

    def __init__(self, ranks: Axis, device: torch.device, is_asked: Callable[[], bool] | None) -> None:
        self._ranks = ranks
        self._device = device
        self._is_asked = is_asked
        self._round = self._next = self._last = 0
        self._asked = time.perf_counter()

    def is_over(self) -> bool:
        """Return whether to leave, the same on all ranks; all call it before each round."""
        number, self._round = self._round, self._round + 1
        if self._is_asked is None or number < self._next:
            return False
        seconds = time.perf_counter() - self._asked
        told = torch.tensor([self._is_asked(), seconds], dtype=torch.float64, device=self._device)
        self._ranks.all_reduce(told, "stop").wait()
        stops, seconds = told.tolist()
        each = seconds / self._ranks.size / max(1, number - self._last)
        rounds = int(_BETWEEN / max(each, 1e-9)) if number else 1
        self._last, self._next = number, number + max(1, rounds)
        self._asked = time.perf_counter()
        return bool(stops)


def are_all_asked(stop: StopSignal, ranks: Coordinator) -> bool:
    """Return whether all ranks are asked to stop, and not some of them to leave; the same on all.

    If some are, wait a moment for the others: a signal to all does not reach all at the same time.
    """
    until = time.monotonic() + _REACHES
    while True:
        told = ranks.all_gather_object((stop.received is not None, time.monotonic() >= until))
        asked = [is_asked for is_asked, _ in told]
        if all(asked) or not any(asked) or any(is_late for _, is_late in told):
            return all(asked)
        time.sleep(_LOOK)


_SEEN = 10.0  # seconds in which a file of one host is seen on another
_PAUSE = 0.1  # seconds between two looks for it


def claim_together(
    coordinator: Coordinator, run: Run, say: Callable[[str], object], *, acts: bool
) -> Writer | None:
    """Return the claim, on the rank that acts; all ranks call this together, before they read the run.

    It may take as long as the process that had the run must be silent. Meanwhile the ranks hear of each
    other, so that none waits in one collective for long.

    Args:
        coordinator: The ranks.
        run: The run, which the rank that acts has made.
        say: Called with one line that says why this waits.
        acts: Whether this rank claims; at most rank 0 does.

    Raises:
        RunError: On all ranks: the run is another process's, cannot be written, or is not seen by a rank.
    """
    claiming = Claiming(run.checkpoints, say, f"the run {shown(run.path)}") if acts else None
    outcome: bool | ShoalError = False
    while not outcome:
        try:
            outcome = claiming is None or claiming.poll() is not None
        except ShoalError as error:
            outcome = error
        except OSError as error:
            outcome = RunError(
                f"the run {shown(run.path)} cannot be written: {error.strerror or error}",
                possible="a directory with room, in which this user may make files",
                change="make it writable, or give another --run",
            )
        outcome = coordinator.all_gather_object(outcome)[0]
    if isinstance(outcome, ShoalError):
        raise outcome
    writer = None if claiming is None else claiming.made
    _require_seen(coordinator, run, "" if writer is None else writer.name)
    return writer


def _require_seen(coordinator: Coordinator, run: Run, name: str) -> None:
    """Check on all ranks that they see the claim of rank 0, if it has one.

    A file may be seen late on another host. The ranks hear of each other meanwhile.

    Raises:
        RunError: A rank does not see it.
    """
    if not (name := coordinator.all_gather_object(name)[0]):
        return
    until = time.monotonic() + _SEEN
    while True:
        blind = "" if (run.checkpoints / name).exists() else platform.node()
        told = coordinator.all_gather_object((blind, time.monotonic() > until))
        hosts = [host for host, _ in told if host]
        if not hosts:
            return
        if any(is_late for _, is_late in told):
            break
        time.sleep(_PAUSE)
    raise RunError(
        f"host {hosts[0]} does not see the run {run.path.absolute()}, which another host writes",
        possible="one directory, on a file system that all hosts have at the same path",
        change="give --run a path on such a file system",
    )


def look_at_host(run: Run, world: World, *, unit: int, replaces_ranks: bool) -> None:
    """Examine this host once, warn of what is bad, and send reports of hangs to the run.

    The examination reads some files and takes some milliseconds; `shoal doctor RUN` prints it.

    Args:
        run: The run.
        world: The ranks.
        unit: First rank of this rank's worker, of several; each has reports of its own.
        replaces_ranks: Whether the launcher notices ranks that are lost or stopped, and replaces them. Then
            the others go on at once, and only a timeout is examined.
    """
    watch = watch_hangs(run.log / (f"hang-{unit}" if unit else "hang"))
    if replaces_ranks:
        watch.faults = ("timeout",)
    if world.local_rank != 0:
        return
    machine, host = LiveMachine(), socket.gethostname()
    report = HostReport(
        host=host,
        when=time.time(),
        findings=examine_quickly(machine, [str(run.path)]),
        interfaces=facts(machine),
    )
    with contextlib.suppress(OSError):  # a full disk is reported where it stops training
        report.write(run.path / "doctor")
    for finding in report.findings:
        if finding.verdict is Verdict.BAD:
            print(f"{host}: {finding.row}: {finding.found}; {finding.change}", file=sys.stderr)
