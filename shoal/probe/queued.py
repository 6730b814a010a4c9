"""Time operations on a GPU apart from the host that starts them.

A small operation alone takes as long as its start by the host. So the device is first held: it waits for a
given time, while the host starts many repetitions and an event before and after them. When the device is
released they run one behind another, and the time between the events is the device's alone. If the host was
not done when the device was released, the device is held for longer and all is repeated. Events say how long
the device was held: it waits for a number of its cycles, and its clock varies.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from statistics import median
from typing import Any, Protocol

import torch

from shoal.probe.place import Place
from shoal.probe.turns import Effort, Key, Operation, time_in_turns

_MOST = 64  # repetitions: a GPU's queue holds about a thousand kernels
_FIRST = 4  # repetitions that tell how many fill a turn
_SPARE = 2.0  # times the host's expected seconds that the device is held
_LEAST_HOLD = 1e-3
_TRIES = 6
_CYCLES = 10_000_000  # 5 ms of a GPU at 2 GHz
_STEADY = 0.01  # change of a clock's rate between two holds that is none


class Clock(Protocol):
    """The times of a host and its device."""

    def now(self) -> float:
        """Return the host's time in seconds."""

    def hold(self, seconds: float) -> None:
        """Let the device wait for about so long before it runs what is started next."""

    def mark(self) -> Any:
        """Start an event that keeps the device's time when it is reached."""

    def between(self, first: Any, second: Any) -> float:
        """Return the device's seconds between two events."""

    def finish(self) -> None:
        """Wait until the device has completed all its work."""


class CudaClock:
    """The clock of a CUDA device and its host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # The host loads a kernel when it is first started, and the device waits meanwhile: that is no hold.
        # An idle device has a slow clock, which rises within milliseconds.
        rate = self._rate()
        for _ in range(_TRIES):
            before, rate = rate, self._rate()
            if math.isclose(before, rate, rel_tol=_STEADY):
                break
        self._cycles = rate

    def _rate(self) -> float:
        """Return the device's cycles in a second, by a hold."""
        self.finish()
        first = self.mark()
        torch.cuda._sleep(_CYCLES)
        second = self.mark()
        self.finish()
        return _CYCLES / self.between(first, second)

    def now(self) -> float:
        """See `Clock`."""
        return time.perf_counter()

    def hold(self, seconds: float) -> None:
        """See `Clock`."""
        torch.cuda._sleep(round(seconds * self._cycles))

    def mark(self) -> torch.cuda.Event:
        """See `Clock`."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        """See `Clock`."""
        return float(first.elapsed_time(second)) / 1e3

    def finish(self) -> None:
        """See `Clock`."""
        torch.cuda.synchronize(self._device)


def time_on_device(operations: Mapping[Key, Operation], place: Place, effort: Effort) -> dict[Key, float]:
    """Return the device's seconds of each operation on this rank, the median over rounds.

    On cores the thread that starts an operation runs it, so this is `time_in_turns`. The arguments are those
    of `time_in_turns`.
    """
    if place.device.type == "cpu":
        return time_in_turns(operations, place, effort)
    clock = CudaClock(place.device)
    seconds: dict[Key, list[float]] = {key: [] for key in operations}
    for index in range(effort.rounds):
        for key in reversed(list(operations)) if index % 2 else operations:
            operations[key]()
            place.ranks.start_together()
            seconds[key].append(queued_seconds(operations[key], clock, effort.turn_seconds))
    return {key: median(turns) for key, turns in seconds.items()}


def queued_seconds(operation: Operation, clock: Clock, turn_seconds: float) -> float:
    """Return the device's seconds of an operation, the mean of repetitions that fill a turn.

    Args:
        operation: Starts the operation's kernels, and does not wait for them.
        clock: The times of the host and the device.
        turn_seconds: Seconds that the repetitions should take at least; there are 64 at most.
    """
    operation()  # what the first call allocates or chooses is no part of it
    once = _repeated(operation, _FIRST, clock)
    count = min(max(_FIRST, round(turn_seconds / max(once, 1e-9))), _MOST)
    return _repeated(operation, count, clock)


def _repeated(operation: Operation, count: int, clock: Clock) -> float:
    clock.finish()
    began = clock.now()
    operation()
    hold = max(_LEAST_HOLD, _SPARE * count * (clock.now() - began))
    seconds = 0.0
    for _ in range(_TRIES):
        clock.finish()
        start = clock.mark()
        began = clock.now()
        clock.hold(hold)
        first = clock.mark()
        for _ in range(count):
            operation()
        second = clock.mark()
        host = clock.now() - began
        clock.finish()
        seconds = clock.between(first, second) / count
        if host < clock.between(start, first):
            break
        hold = _SPARE * max(hold, host)
    return seconds
