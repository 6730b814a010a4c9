"""Spans between events on the streams of a device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, final

from shoal.record.device import DeviceEvents
from shoal.record.device_clock import DeviceClock
from shoal.record.holding import Holding
from shoal.record.recorder import OpenSpan, Started
from shoal.record.span_file import Fields


@dataclass(slots=True)
class Recording:
    """The state that spans of one recorder share; any thread may use it.

    Attributes:
        events: The events of the device.
        clock: Its clock.
        holding: What holds the device in some steps.
        free: Events that can be recorded anew.
        ended: Spans whose last event has been recorded, in this order.
    """

    events: DeviceEvents
    clock: DeviceClock
    holding: Holding
    free: list[Any] = field(default_factory=list)
    ended: list[DeviceSpan] = field(default_factory=list)

    def mark(self) -> Any:
        """Return an event that was recorded now on the current stream."""
        try:
            event = self.free.pop()
        except IndexError:
            event = self.events.new_event()
        self.events.record(event)
        return event


@final
class DeviceSpan:
    """A span between two events, as a context or between `start` and `finish`.

    Slots, no generator and few calls: this code runs for every span.

    Attributes:
        lane: Its lane.
        algorithm: The algorithm of a collective.
        since: The last tie of the clocks when it started.
        begin: The event at its start.
        end: The event at its end; None if it ended at a time of the host.
        stop: That time.
    """

    __slots__ = (
        *("_fields", "_host_start", "_host_stop", "_recording"),
        *("algorithm", "begin", "end", "lane", "since", "stop"),
    )

    def __init__(
        self,
        recording: Recording,
        kind: str,
        lane: str,
        name: str,
        bytes: int,
        group: tuple[int, ...],
        purpose: str,
    ) -> None:
        self._recording = recording
        self._fields = kind, name, bytes, group, purpose
        self._host_start: float | None = None
        self.lane = lane
        self.algorithm = ""

    def __enter__(self) -> None:
        recording = self._recording
        if recording.holding.is_on:
            recording.holding.before(*self._fields[:2])
        self.since = recording.clock.last
        self._host_start = time.perf_counter()
        self.begin = recording.mark()

    def __exit__(self, *error: object) -> None:
        recording = self._recording
        self._host_stop = time.perf_counter()
        self.end = recording.mark()
        recording.ended.append(self)
        if recording.holding.is_next:
            assert self._host_start is not None
            recording.holding.note(*self._fields[:2], self._host_stop - self._host_start)

    def start(self) -> None:
        """Start the span on the current stream."""
        self.since = self._recording.clock.last
        self.begin = self._recording.mark()

    def finish(self, at: float | None, algorithm: str) -> None:
        """End the span on the current stream, or at a time of the host."""
        self.algorithm = algorithm
        if at is None:
            self.end = self._recording.mark()
        else:
            self.end, self.stop = None, at
        self._recording.ended.append(self)

    def taken(self) -> Fields | None:
        """Return what is written of the span, and give its events back; None if its times are not known."""
        recording, end, begin = self._recording, self.end, self.begin
        is_complete, time_of = recording.events.is_complete, recording.clock.time_of
        if (end is not None and not is_complete(end)) or not is_complete(begin):
            return None
        stop = self.stop if end is None else time_of(end, self.since)
        if stop is None or (start := time_of(begin, self.since)) is None:
            return None
        recording.free.append(begin)
        if end is not None:
            recording.free.append(end)
        kind, name, bytes, group, purpose = self._fields
        host = None if self._host_start is None else (self._host_start, self._host_stop)
        lasted = stop - start if stop > start else 0.0
        return kind, self.lane, name, start, lasted, bytes, group, self.algorithm, purpose, host


@final
class SpanBeside(OpenSpan):
    """A span on a stream that does nothing else; it starts once this stream and the current one come to it.

    Args:
        span: The span.
        events: The events of the device.
        stream: The name of the stream.
    """

    __slots__ = ("_events", "_span", "_stream")

    def __init__(self, span: DeviceSpan, events: DeviceEvents, stream: str) -> None:
        events.follow(stream)
        with events.beside(stream):
            self._span = Started(span)
        self._events = events
        self._stream = stream

    def close_after(self, waits: Iterable[Callable[[], object]]) -> None:
        """End the span once its stream has waited for work; each function makes the current stream wait."""
        with self._events.beside(self._stream):
            for wait in waits:
                wait()
            self._span.close()

    def close(self, at: float | None = None, algorithm: str = "") -> None:
        """See `OpenSpan.close`."""
        self._span.close(at, algorithm)
