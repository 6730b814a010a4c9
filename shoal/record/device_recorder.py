"""The recorder of a rank that computes on a device: times of spans are those of events on its streams.

The host runs ahead of the device, so that its clock says when work was given and not when it was done. A span
has an event at its start and one at its end, on the stream that is current there. At the end of a step, the
events that are complete become times and go back to a pool; others are left for later. Nothing waits for the
device but making the clock and `close`.

The clock of a device, tied to the host's, without waiting for the device.

A *tie* is an event of which the host's time is known. It is recorded on a stream without work, so that it
completes at once: after the host's reading before it was recorded, and before the reading after the host saw
it complete. These bounds are some microseconds apart; where the device is slow to answer they are further
apart, and still true. A tie is made a few times a second, so that clocks may drift.

Seconds between events are exact only if they are few (CUDA gives milliseconds as a float of 24 bits), so each
event is measured from the last tie before it, and each tie from the one before. Between two ties time runs
evenly. An event after the last tie has no time yet: so no time that was told is ever corrected, and times
have the order of the device.

Held steps: which they are, and how long the device is held before each span.

The events of a span do not tell how long the device idled within it because the host had not given the next
kernel yet. In a held step the device is kept busy before each span that computes, for longer than the host
took to give this span in the step before. Then all work of the span is there when the device comes to it, and
its events tell the work's own time: `shoal.spec.timeline.breakdown` compares the other steps with it.
"""

from __future__ import annotations

import os
import time
import warnings
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

from shoal.record.recorder import (
    DROPPED,
    Fields,
    FileRecorder,
    Marks,
    OpenSpan,
    SpanFile,
    Started,
    step_is_kept,
)
from shoal.spec.timeline.breakdown import WORK
from shoal.spec.timeline.span import Kind, Lane


class DeviceEvents(ABC):
    """Events on the streams of one device; nothing here waits for the device.

    Work on one stream runs in order, and streams run beside one another. An event that is recorded on a
    stream completes when the stream comes to it.
    """

    @abstractmethod
    def new_event(self) -> Any:
        """Return an event that can be recorded, again and again."""

    @abstractmethod
    def record(self, event: Any) -> None:
        """Record the event on the calling thread's current stream."""

    @abstractmethod
    def record_alone(self, event: Any) -> None:
        """Record the event on a stream that has no work, so that it completes at once."""

    @abstractmethod
    def is_complete(self, event: Any) -> bool:
        """Return whether the stream has come to the event."""

    @abstractmethod
    def seconds_between(self, first: Any, second: Any) -> float:
        """Return the seconds from one complete event to a later one."""

    @abstractmethod
    def beside(self, name: str) -> AbstractContextManager[object]:
        """Return a context in which a stream of this name is the current one; it is made at first use."""

    @abstractmethod
    def follow(self, name: str) -> None:
        """Make the stream of this name wait for what the current stream has been given."""

    @abstractmethod
    def hold(self, seconds: float) -> None:
        """Keep the current stream busy for about as long, so that the host gets ahead of it."""


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


_FIRST = 3
"""The first step of a process that is held: those before warm up."""

_MARGIN = 1.5
"""A hold in times of what the host took for the span: a hold is not exact."""

_LONGEST = 0.1
"""Seconds. CUDA takes about 1,024 launches ahead of the device, and these take the host 10 to 20 ms."""


@final
class Holding:
    """Hold the device in the 3rd, 30th, 300th... step of a process.

    Args:
        events: The events of the device.

    Attributes:
        is_on: Whether the present step is held.
        is_next: Whether the next step is; then the host's times of the present one are noted.
    """

    def __init__(self, events: DeviceEvents) -> None:
        self._events = events
        self._steps = 0
        self._host_seconds: dict[tuple[str, str], float] = {}
        self.is_on = self.is_next = False

    def begin_step(self) -> None:
        """Note that a step begins."""
        self._steps += 1
        self.is_on, self.is_next = _is_held(self._steps), _is_held(self._steps + 1)

    def end_step(self) -> None:
        """Note that the step has ended."""
        self.is_on = self.is_next = False

    def before(self, kind: str, name: str) -> None:
        """Hold the device before a span of this kind and name, in a step that is held."""
        if took := self._host_seconds.get((kind, name)):
            self._events.hold(min(_MARGIN * took, _LONGEST))

    def note(self, kind: str, name: str, seconds: float) -> None:
        """Note for how long the host gave the device a span of this kind and name."""
        if kind in WORK:
            self._host_seconds[kind, name] = seconds


def _is_held(count: int) -> bool:
    while count > _FIRST and count % 10 == 0:
        count //= 10
    return count == _FIRST


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


_TIE_SECONDS = 0.1
"""Seconds from one tie of the clocks to the next, at least."""

_CLOSING_SECONDS = 5.0
"""Seconds for which `close` waits for the device, at most: a collective may never end."""


@final
class DeviceRecorder(FileRecorder):
    """Record the spans of a rank whose device computes; their times are those of events on its streams.

    Args:
        path: The timeline file of the rank; a resumed run appends to it.
        rank: The global rank.
        events: The events of the device.
        say: Called with a report of what cannot be recorded, one line.
        marks: See `FileRecorder`.
        first: See `SpanFile`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        rank: int,
        events: DeviceEvents,
        *,
        say: Callable[[str], object] = warnings.warn,
        marks: Marks | None = None,
        first: int = 0,
    ) -> None:
        self._say = say
        self._file = SpanFile(path, rank, say, first)
        self._recording = Recording(events, DeviceClock(events), Holding(events))
        super().__init__(partial(DeviceSpan, self._recording), marks)
        self._has_failed = False

    def open_beside(
        self,
        stream: str,
        kind: Kind,
        name: str = "",
        *,
        lane: Lane,
        bytes: int = 0,
        group: tuple[int, ...] = (),
        purpose: str = "",
    ) -> OpenSpan:
        """Start a span on a stream of the recorder's, named `stream`; return a `SpanBeside` if it is kept."""
        if self._in_dropped_step:
            return DROPPED
        span = self._new_span(kind, lane, name, bytes, group, purpose)
        return SpanBeside(span, self._recording.events, stream)

    def step(self, index: int) -> AbstractContextManager[None]:
        """See `Recorder.step`."""
        return _DeviceStep(self, index)

    def close(self) -> None:
        """See `Recorder.close`. It waits some seconds for spans that have not ended on the device."""
        ended, until = self._recording.ended, time.perf_counter() + _CLOSING_SECONDS
        try:
            while ended and time.perf_counter() < until:
                if self._recording.clock.tie():
                    self._take_complete()
                if ended:
                    time.sleep(0.001)
        except RuntimeError as error:
            self._give_up(error)
        if ended:
            self._say(f"the timeline lacks {len(ended)} spans that have not ended on the device")
            ended.clear()
        self._file.close()

    def _enter_step(self, index: int) -> DeviceSpan | None:
        """Return the span of the step; None if its spans are dropped."""
        holding = self._recording.holding
        holding.begin_step()
        self._in_dropped_step = self._has_failed or not (holding.is_on or step_is_kept(index))
        if self._in_dropped_step:
            return None
        kind = Kind.HELD_STEP if holding.is_on else Kind.STEP
        return DeviceSpan(self._recording, kind, Lane.COMPUTE, str(index), 0, (), "")

    def _leave_step(self) -> None:
        self._recording.holding.end_step()
        self._in_dropped_step = self._has_failed
        if self._has_failed:
            return
        now, clock = time.perf_counter(), self._recording.clock
        try:
            if now - clock.last.host >= _TIE_SECONDS and clock.tie():
                self._take_complete()
        except RuntimeError as error:
            self._give_up(error)
        self._file.flush_if_due(now)

    def _take_complete(self) -> None:
        """Pass spans whose times are known on to the file."""
        # Other threads may append now: they add only behind the spans taken here.
        ended = self._recording.ended
        count = len(ended)
        taken = ended[:count]
        del ended[:count]
        left: list[DeviceSpan] = []
        compute_is_behind = False
        for span in taken:
            # Compute is one stream: after a span that has not ended come only such, and are not asked.
            is_compute = span.lane == Lane.COMPUTE
            fields = None if is_compute and compute_is_behind else span.taken()
            if fields is None:
                left.append(span)
                compute_is_behind |= is_compute
            else:
                self._file.spans.append(fields)
        ended[:0] = left

    def _give_up(self, error: RuntimeError) -> None:
        """Record no more: the device has failed, and the work that it fails says so better."""
        self._has_failed = self._in_dropped_step = True
        self._recording.ended.clear()
        self._say(f"the timeline is no longer written: the device's events failed: {error}")


@final
class _DeviceStep:
    """The context of `DeviceRecorder.step`."""

    __slots__ = ("_index", "_recorder", "_span")

    def __init__(self, recorder: DeviceRecorder, index: int) -> None:
        self._recorder = recorder
        self._index = index

    def __enter__(self) -> None:
        self._span = self._recorder._enter_step(self._index)
        if self._span is not None:
            self._span.__enter__()

    def __exit__(self, error_type: type[BaseException] | None, *others: object) -> None:
        if self._span is not None and error_type is None:
            self._span.__exit__(None, None, None)
        self._recorder._leave_step()
