"""A device that is a simulation: streams that run beside the host, and events on them, in no real time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy

from shoal.record import DeviceEvents

RECORD, QUERY, LATENCY = 2e-6, 0.5e-6, 4e-6
"""Seconds that the host takes to record an event and to query one, and until a device begins what it gets."""

QUEUE = 1024
"""Launches that a device takes before it has begun them; then the host waits."""


class Event:
    """An event; `at` is the true time at which its stream comes to it."""

    def __init__(self) -> None:
        self.at: float | None = None


@dataclass
class Stream:
    """A stream: it has done all that it was given at `free`."""

    free: float = 0.0


class SimulatedDevice(DeviceEvents):
    """See `DeviceEvents`. The true time is the host's.

    Args:
        offset: What the device's clock shows at the host's second 0.
        drift: What it gains in a second.

    Attributes:
        now: The host's time.
        marks: True times of the events that were recorded on current streams, in this order.
        idle: True times in which the stream "compute" had nothing to do: the host had not given it more.
        made: Number of events.
    """

    def __init__(self, *, offset: float = 5e3, drift: float = 0.0) -> None:
        self._offset, self._drift = offset, drift
        self._streams = {"compute": Stream()}
        self._current = ["compute"]
        self._begins: deque[float] = deque()
        self.now = 100.0
        self.marks: list[float] = []
        self.idle: list[tuple[float, float]] = []
        self.made = 0

    def host_works(self, seconds: float) -> None:
        self.now += seconds

    def launch(self, seconds: float, *, host: float = 5e-6) -> None:
        """Give the current stream a kernel, which takes the host some time."""
        self.now += host
        while self._begins and self._begins[0] <= self.now:
            self._begins.popleft()
        if len(self._begins) == QUEUE:
            self.now = self._begins.popleft()
        stream, arrives = self._stream, self.now + LATENCY
        begin = max(arrives, stream.free)
        if self._current[-1] == "compute" and stream.free < arrives:
            self.idle.append((stream.free, arrives))
        stream.free = begin + seconds
        self._begins.append(begin)

    def wait_for(self, name: str) -> None:
        """Make the current stream wait for what a stream has been given."""
        self._stream.free = max(self._stream.free, self._streams[name].free)

    def wait_until(self, at: float) -> None:
        """Make the current stream wait until a true time."""
        self._stream.free = max(self._stream.free, at)

    def busy_until(self, name: str) -> float:
        return self._streams[name].free

    def run_out(self) -> None:
        """Let the host's time pass until all streams are done."""
        self.now = max(self.now, *(stream.free for stream in self._streams.values())) + 1e-3

    def new_event(self) -> Event:
        self.made += 1
        return Event()

    def record(self, event: Event) -> None:
        self.now += RECORD
        event.at = max(self.now + LATENCY, self._stream.free)
        self.marks.append(event.at)

    def record_alone(self, event: Event) -> None:
        self.now += RECORD
        event.at = self.now + LATENCY

    def is_complete(self, event: Event) -> bool:
        self.now += QUERY
        assert event.at is not None
        return event.at <= self.now

    def seconds_between(self, first: Event, second: Event) -> float:
        assert first.at is not None
        assert second.at is not None
        assert max(first.at, second.at) <= self.now, "the time of an event that is not complete"
        milliseconds = (self._shows(second.at) - self._shows(first.at)) * 1e3
        assert milliseconds >= 0, "time from an event to an earlier one"
        return float(numpy.float32(milliseconds)) / 1e3

    @contextmanager
    def beside(self, name: str) -> Iterator[None]:
        self._streams.setdefault(name, Stream())
        self._current.append(name)
        yield
        self._current.pop()

    def follow(self, name: str) -> None:
        stream = self._streams.setdefault(name, Stream())
        stream.free = max(stream.free, self._stream.free)

    def hold(self, seconds: float) -> None:
        self.launch(0.8 * seconds)

    @property
    def _stream(self) -> Stream:
        return self._streams[self._current[-1]]

    def _shows(self, at: float) -> float:
        return self._offset + at * (1 + self._drift)
