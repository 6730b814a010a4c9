"""The clock of a device, tied to the host's, without waiting for the device.

A *tie* is an event of which the host's time is known. It is recorded on a stream without work, so that it
completes at once: after the host's reading before it was recorded, and before the reading after the host saw
it complete. These bounds are some microseconds apart; where the device is slow to answer they are further
apart, and still true. A tie is made a few times a second, so that clocks may drift.

Seconds between events are exact only if they are few (CUDA gives milliseconds as a float of 24 bits), so each
event is measured from the last tie before it, and each tie from the one before. Between two ties time runs
evenly. An event after the last tie has no time yet: so no time that was told is ever corrected, and times
have the order of the device.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, final

from shoal.record.device import DeviceEvents

_QUERIES = 50
"""Queries of a tie before it is left for the next time: about as many microseconds."""

_KEPT = 1024
"""Ties that are kept, for spans that last long."""


@dataclass(frozen=True, slots=True)
class Tie:
    """A complete event and its time.

    Attributes:
        event: The event.
        device: Seconds from the first tie, on the device's clock.
        host: Seconds on the clock of `time.perf_counter`.
    """

    event: Any
    device: float
    host: float


@final
class DeviceClock:
    """Tell the host's time of a device's events. To make one waits for the device once.

    Args:
        events: The events of the device.

    Attributes:
        last: The last tie, from which events that are recorded from now on are measured.
    """

    def __init__(self, events: DeviceEvents) -> None:
        self._events = events
        event = events.new_event()
        before = time.perf_counter()
        events.record_alone(event)
        while not events.is_complete(event):
            time.sleep(0)
        self.last = Tie(event, 0.0, (before + time.perf_counter()) / 2)
        self._coming: tuple[Any, float] | None = None
        # Between two ties: the device's time at the first, and the host's with its rate from there on.
        self._starts: list[float] = []
        self._lines: list[tuple[float, float]] = []

    def tie(self) -> bool:
        """Make a tie, or look again at the one that is not complete yet; return whether it is complete."""
        if self._coming is None:
            event, before = self._events.new_event(), time.perf_counter()
            self._events.record_alone(event)
            self._coming = event, before
        event, before = self._coming
        for _ in range(_QUERIES):
            if self._events.is_complete(event):
                self._add(event, before, time.perf_counter())
                self._coming = None
                return True
        return False

    def time_of(self, event: Any, since: Tie) -> float | None:
        """Return the host's time of a complete event; None if no tie came after it.

        Args:
            event: The event.
            since: The last tie when it was recorded.
        """
        device = since.device + self._events.seconds_between(since.event, event)
        if device > self.last.device or not self._starts:
            return None
        # An event before all ties that are kept is on the first line.
        number = max(bisect_right(self._starts, device) - 1, 0)
        host, rate = self._lines[number]
        return host + (device - self._starts[number]) * rate

    def _add(self, event: Any, before: float, seen: float) -> None:
        last = self.last
        passed = self._events.seconds_between(last.event, event)
        host = min(max(last.host + passed, before), seen)
        if passed > 0:
            self._starts.append(last.device)
            self._lines.append((last.host, (host - last.host) / passed))
        self.last = Tie(event, last.device + passed, host)
        if len(self._starts) > _KEPT:
            del self._starts[: _KEPT // 2], self._lines[: _KEPT // 2]
