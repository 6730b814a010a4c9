"""Spans between events on the streams of a device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, final

from shoal.record.device import DeviceEvents
from shoal.record.device_clock import DeviceClock, Tie
from shoal.record.holding import Holding
from shoal.record.recorder import OpenSpan
from shoal.record.span_file import Fields

__all__ = ["DeviceSpan", "Recording", "SpanBeside"]


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

    Slots and no generator: this code runs for every span.

    Attributes:
        lane: Its lane.
        algorithm: The algorithm of a collective.
        events: The events at its start and its end; without that at its end if the host's time is its end.
        since: The last tie of the clocks when it started.
        stop: The host's time at which it ended, if there is no event at its end.
    """

    __slots__ = ("_fields", "_host", "_recording", "algorithm", "events", "lane", "since", "stop")

    events: tuple[Any, ...]
    since: Tie

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
        self._host: tuple[float, float] | None = None
        self.lane = lane
        self.algorithm = ""
        self.stop = 0.0

    def __enter__(self) -> None:
        self._recording.holding.before(*self._fields[:2])
        self._host = time.perf_counter(), 0.0
        self.start()

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._host is not None
        start, now = self._host[0], time.perf_counter()
        self._host = start, now
        self._recording.holding.note(*self._fields[:2], now - start)
        self.finish()

    def start(self) -> None:
        """Start the span on the current stream."""
        self.since = self._recording.clock.last
        self.events = (self._recording.mark(),)

    def finish(self, at: float | None = None) -> None:
        """End the span on the current stream, or at a time of the host."""
        if at is None:
            self.events = self.events[0], self._recording.mark()
        else:
            self.stop = at
        self._recording.ended.append(self)

    def times(self) -> tuple[float, float] | None:
        """Return start and stop on the host's clock; None if they are not known yet."""
        recording = self._recording
        if not all(map(recording.events.is_complete, reversed(self.events))):
            return None
        times = [recording.clock.time_of(event, self.since) for event in self.events]
        start, stop = times if len(times) == 2 else (*times, self.stop)
        return None if start is None or stop is None else (start, max(start, stop))

    def written(self, start: float, stop: float) -> Fields:
        """Return what is written of the span."""
        kind, name, bytes, group, purpose = self._fields
        times = start, stop - start
        return kind, self.lane, name, *times, bytes, group, self.algorithm, purpose, self._host


@final
class OpenDeviceSpan(OpenSpan):
    """A span that starts when made; its lock lets only one of several closing threads through."""

    __slots__ = ("_once", "_span")

    def __init__(self, span: DeviceSpan) -> None:
        self._once = threading.Lock()
        self._span = span
        span.start()

    def close(self, at: float | None = None, algorithm: str = "") -> None:
        """See `OpenSpan.close`."""
        if self._once.acquire(blocking=False):
            self._span.algorithm = algorithm
            self._span.finish(at)


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
            self._span = OpenDeviceSpan(span)
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
