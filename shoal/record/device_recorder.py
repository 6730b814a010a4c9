"""The recorder of a rank that computes on a device: times of spans are those of events on its streams.

The host runs ahead of the device, so that its clock says when work was given and not when it was done. A span
has an event at its start and one at its end, on the stream that is current there. At the end of a step, the
events that are complete become times and go back to a pool; others are left for later. Nothing waits for the
device but making the clock and `close`.

The events of a span do not tell how long the device idled within it because the host had not given the next
kernel yet. So there are *held* steps: before each span the device is kept busy for as long as the host took
for this span in the step before. Then the work of the span is there when the device comes to it, and its
events tell its own time. Held steps are rare, and have a kind of their own, which reports leave out.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, final

from shoal.record.device import DeviceEvents
from shoal.record.device_clock import DeviceClock
from shoal.record.recorder import DROPPED, OpenSpan, Recorder, step_is_kept
from shoal.record.span_file import Fields, SpanFile
from shoal.timeline.span import Kind, Lane

__all__ = ["DeviceRecorder"]

_TIE_SECONDS = 0.1
"""Seconds from one tie of the clocks to the next, at least."""

_CLOSING_SECONDS = 5.0
"""Seconds for which `close` waits for the device, at most: a collective may never end."""

_WORK = (Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER)

_FIRST_HELD_STEP = 3
"""The first step that is held, as of a process's own: those before warm up."""

_HOLD = 1.5
"""A hold in times of what the host took for the span: a hold is not exact."""

_LONGEST_HOLD = 0.1
"""Seconds. CUDA takes about 1,024 launches ahead of the device, and these take the host 10 to 20 ms."""


@final
class DeviceRecorder(Recorder):
    """Record spans of a device into the timeline file of a rank. See `SpanRecorder` for which are kept.

    Args:
        path: The timeline file of the rank; a resumed run appends to it.
        rank: The global rank.
        events: The events of the device.
        say: Called with a report of what cannot be recorded, one line.

    Attributes:
        events: The events of the device.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        rank: int,
        events: DeviceEvents,
        *,
        say: Callable[[str], object] = warnings.warn,
    ) -> None:
        self.events = events
        self._say = say
        self._file = SpanFile(path, rank, say)
        self._clock = DeviceClock(events)
        self._free: list[Any] = []
        self._ended: list[_DeviceSpan] = []
        self._host_seconds: dict[tuple[str, str], float] = {}
        self._steps = 0
        self._is_held = False
        self._in_dropped_step = False
        self._has_failed = False

    def span(
        self,
        kind: Kind,
        name: str = "",
        *,
        lane: Lane = Lane.COMPUTE,
        bytes: int = 0,
        group: tuple[int, ...] = (),
        purpose: str = "",
    ) -> AbstractContextManager[None]:
        """See `Recorder.span`."""
        if self._in_dropped_step:
            return DROPPED
        return _DeviceSpan(self, kind, lane, name, bytes, group, purpose)

    def open(
        self,
        kind: Kind,
        name: str = "",
        *,
        lane: Lane,
        bytes: int = 0,
        group: tuple[int, ...] = (),
        purpose: str = "",
    ) -> OpenSpan:
        """See `Recorder.open`."""
        if self._in_dropped_step:
            return DROPPED
        return _DeviceOpenSpan(_DeviceSpan(self, kind, lane, name, bytes, group, purpose))

    def step(self, index: int) -> AbstractContextManager[None]:
        """See `Recorder.step`."""
        return _DeviceStep(self, index)

    def close(self) -> None:
        """See `Recorder.close`. It waits some seconds for spans that have not ended on the device."""
        try:
            until = time.perf_counter() + _CLOSING_SECONDS
            while self._ended and time.perf_counter() < until:
                if self._clock.tie():
                    self._take_complete()
                if self._ended:
                    time.sleep(0.001)
            if self._ended:
                self._say(f"the timeline lacks {len(self._ended)} spans that have not ended on the device")
                self._ended.clear()
        except RuntimeError as error:
            self._give_up(error)
        self._file.close()

    def _enter_step(self, index: int) -> None:
        self._steps += 1
        self._is_held = _step_is_held(self._steps)
        self._in_dropped_step = self._has_failed or not (self._is_held or step_is_kept(index))

    def _leave_step(self) -> None:
        self._is_held = False
        self._in_dropped_step = self._has_failed
        if self._has_failed:
            return
        now = time.perf_counter()
        try:
            if now - self._clock.last.host >= _TIE_SECONDS and self._clock.tie():
                self._take_complete()
        except RuntimeError as error:
            self._give_up(error)
        self._file.flush_if_due(now)

    def _mark(self) -> Any:
        """Return an event that was recorded now on the current stream."""
        try:
            event = self._free.pop()
        except IndexError:
            event = self.events.new_event()
        self.events.record(event)
        return event

    def _hold(self, kind: str, name: str) -> None:
        """Keep the device busy while the host gives it a span of this kind and name."""
        took = self._host_seconds.get((kind, name), 0.0)
        if took > 0:
            self.events.hold(min(_HOLD * took, _LONGEST_HOLD))

    def _take_complete(self) -> None:
        """Pass spans whose events have a time on to the file, and their events back to the pool."""
        # Other threads may append now: they add only behind the spans taken here.
        count = len(self._ended)
        taken = self._ended[:count]
        del self._ended[:count]
        left: list[_DeviceSpan] = []
        behind: set[str] = set()
        for span in taken:
            # Compute is one stream: where a span has not ended, later ones have not, and are not asked.
            times = None if span.lane in behind else self._times_of(span)
            if times is None:
                left.append(span)
                if span.lane == Lane.COMPUTE:
                    behind.add(span.lane)
                continue
            self._file.spans.append(span.fields(*times))
            self._free += span.events()
        self._ended[:0] = left

    def _times_of(self, span: _DeviceSpan) -> tuple[float, float] | None:
        """Return start and stop of a span; None if they are not known yet."""
        if not all(map(self.events.is_complete, span.events())):
            return None
        start = self._clock.time_of(span.begin, span.tie)
        stop = span.stop if span.end is None else self._clock.time_of(span.end, span.tie)
        return None if start is None or stop is None else (start, max(start, stop))

    def _give_up(self, error: RuntimeError) -> None:
        """Record no more: the device has failed, which its own work tells better."""
        self._has_failed = self._in_dropped_step = True
        self._ended.clear()
        self._say(f"the timeline is no longer written: the device's events failed: {error}")
        self._file.close()


def _step_is_held(count: int) -> bool:
    """Return whether the device is held in this step of a process, counted from 1: the 3rd, 30th, 300th..."""
    while count >= 10 * _FIRST_HELD_STEP and count % 10 == 0:
        count //= 10
    return count == _FIRST_HELD_STEP


class _DeviceSpan:
    """A span between two events. Slots and no generator: this code runs for every span.

    Attributes:
        lane: Its lane.
        tie: The last tie of the clocks when it started.
        begin: The event at its start.
        end: The event at its end; None if a host's time is its end.
        stop: That time.
    """

    __slots__ = (
        "_bytes",
        "_group",
        "_host",
        "_kind",
        "_name",
        "_purpose",
        "_recorder",
        "algorithm",
        "begin",
        "end",
        "lane",
        "stop",
        "tie",
    )

    def __init__(
        self,
        recorder: DeviceRecorder,
        kind: str,
        lane: str,
        name: str,
        bytes: int,
        group: tuple[int, ...],
        purpose: str,
    ) -> None:
        self._recorder = recorder
        self._kind = kind
        self.lane = lane
        self._name = name
        self._bytes = bytes
        self._group = group
        self._purpose = purpose
        self._host: tuple[float, float] | None = None
        self.algorithm = ""
        self.end: Any = None
        self.stop = 0.0

    def __enter__(self) -> None:
        recorder = self._recorder
        if recorder._is_held and self._kind in _WORK:
            recorder._hold(self._kind, self._name)
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
        if self._kind in _WORK:
            self._recorder._host_seconds[self._kind, self._name] = now - start
        self.finish()

    def start(self) -> None:
        self.tie = self._recorder._clock.last
        self.begin = self._recorder._mark()

    def finish(self, at: float | None = None) -> None:
        """End the span on the current stream, or at a time of the host."""
        if at is None:
            self.end = self._recorder._mark()
        else:
            self.stop = at
        self._recorder._ended.append(self)

    def events(self) -> tuple[Any, ...]:
        return (self.begin,) if self.end is None else (self.end, self.begin)

    def fields(self, start: float, stop: float) -> Fields:
        """Return what is written of the span."""
        what = self._kind, self.lane, self._name
        sizes = self._bytes, self._group
        return (*what, start, stop - start, *sizes, self.algorithm, self._purpose, self._host)


class _DeviceOpenSpan(OpenSpan):
    """A span that starts when made; its lock lets only one of several closing threads through."""

    __slots__ = ("_once", "_span")

    def __init__(self, span: _DeviceSpan) -> None:
        self._once = threading.Lock()
        self._span = span
        span.start()

    def close(self, at: float | None = None, algorithm: str = "") -> None:
        if self._once.acquire(blocking=False):
            self._span.algorithm = algorithm
            self._span.finish(at)


class _DeviceStep:
    """The context of `DeviceRecorder.step`."""

    __slots__ = ("_index", "_recorder", "_span")

    def __init__(self, recorder: DeviceRecorder, index: int) -> None:
        self._recorder = recorder
        self._index = index
        self._span: _DeviceSpan | None = None

    def __enter__(self) -> None:
        recorder = self._recorder
        recorder._enter_step(self._index)
        if not recorder._in_dropped_step:
            kind = Kind.HELD_STEP if recorder._is_held else Kind.STEP
            self._span = _DeviceSpan(recorder, kind, Lane.COMPUTE, str(self._index), 0, (), "")
            self._span.__enter__()

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._span is not None and error_type is None:
            self._span.__exit__(None, None, None)
        self._recorder._leave_step()
