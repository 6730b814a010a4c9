"""The recorder of a rank that computes on a device: times of spans are those of events on its streams.

The host runs ahead of the device, so that its clock says when work was given and not when it was done. A span
has an event at its start and one at its end, on the stream that is current there. At the end of a step, the
events that are complete become times and go back to a pool; others are left for later. Nothing waits for the
device but making the clock and `close`.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import final

from shoal.record.device import DeviceEvents
from shoal.record.device_clock import DeviceClock
from shoal.record.device_span import DeviceSpan, Recording, SpanBeside
from shoal.record.holding import Holding
from shoal.record.marks import Marks
from shoal.record.recorder import DROPPED, FileRecorder, OpenSpan, step_is_kept
from shoal.record.span_file import SpanFile
from shoal.timeline.span import Kind, Lane

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
