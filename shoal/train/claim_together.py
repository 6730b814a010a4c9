"""Claim a run for a training: the first rank does, and the others check that they see the same directory."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable

from shoal.checkpoint import Coordinator
from shoal.errors import RunError, ShoalError
from shoal.run import Run, shown
from shoal.run.writer import Claiming, Writer

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
