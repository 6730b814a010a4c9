"""The recorder: a training loop calls it to write its Timeline while it runs.

    with recorder.step(index):
        with recorder.span(Kind.FORWARD):
            ...
        pending = recorder.open(Kind.COLLECTIVE, "all_reduce:0", lane=Lane.COMMUNICATION, bytes=n, group=g)
        work.get_future().add_done_callback(lambda _: pending.close())

A span costs about a microsecond: two readings of the clock and one append. Formatting and writing happen
about once a second, between two steps.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, final

from shoal.record.clock_exchange import clock_name
from shoal.record.metrics import AppendFile
from shoal.spec.timeline.span import Kind, Lane, header_line, span_line


@final
class Marks:
    """The marks that a recorder makes beside its spans; none at first.

    Attributes:
        new: Returns the context that marks a span, from the span's kind and name; None to mark nothing.
    """

    __slots__ = ("new",)

    def __init__(self) -> None:
        self.new: Callable[[str], AbstractContextManager[object]] | None = None


@final
class Marked:
    """A span and its mark as one context."""

    __slots__ = ("_mark", "_span")

    def __init__(self, span: AbstractContextManager[None], mark: AbstractContextManager[object]) -> None:
        self._span = span
        self._mark = mark

    def __enter__(self) -> None:
        self._mark.__enter__()
        self._span.__enter__()

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._span.__exit__(error_type, error, traceback)
        self._mark.__exit__(error_type, error, traceback)


_FLUSH_SECONDS = 1.0

Fields = tuple[str, str, str, float, float, int, tuple[int, ...], str, str, tuple[float, float] | None]
"""The arguments of `span_line`, with its times still on the clock of the process."""


class SpanFile:
    """Append spans to the timeline file of a rank, about once a second. A failure costs only the record.

    Args:
        path: The timeline file of the rank; a resumed run appends to it.
        rank: The global rank.
        say: Called with the report of a failure to write, one line.
        first: The global rank from which groups of spans count.

    Attributes:
        spans: Spans that are not written yet; any thread may append to them.
    """

    def __init__(
        self, path: str | os.PathLike[str], rank: int, say: Callable[[str], object], first: int = 0
    ) -> None:
        self._file = AppendFile(path, "the timeline", say)
        self._origin = time.perf_counter()
        self._file.write(header_line(rank, time.time_ns(), clock_name(), round(self._origin * 1e9)))
        self._first = first
        self.spans: list[Fields] = []
        self._flushed = self._origin

    def flush_if_due(self, now: float) -> None:
        """Write the spans if the last time is a second ago; `now` is a reading of `time.perf_counter`."""
        if now - self._flushed >= _FLUSH_SECONDS:
            self._flushed = now
            self.flush()

    def flush(self) -> None:
        """Write the spans."""
        # Other threads may append now: they add only behind the spans taken here.
        count = len(self.spans)
        taken = self.spans[:count]
        del self.spans[:count]
        origin, first = self._origin, self._first
        self._file.write(
            "".join(
                span_line(
                    kind,
                    lane,
                    name,
                    start - origin,
                    duration,
                    bytes,
                    tuple(each + first for each in group) if first else group,
                    algorithm,
                    purpose,
                    host and (host[0] - origin, host[1] - origin),
                )
                for kind, lane, name, start, duration, bytes, group, algorithm, purpose, host in taken
            )
        )

    def close(self) -> None:
        """Write the spans and close the file; spans that come later are lost."""
        self.flush()
        self._file.close()


class OpenSpan(ABC):
    """A span that has started; `close` ends it."""

    __slots__ = ()

    @abstractmethod
    def close(self, at: float | None = None, algorithm: str = "") -> None:
        """End the span. Any thread may call it, any number of times: the first call counts.

        Args:
            at: Time at which it ended, on the clock of `time.perf_counter`; None for now.
            algorithm: Algorithm of the collective.
        """


class Recorder(ABC):
    """A receiver of a rank's spans.

    Any thread may record spans; one thread runs the steps.
    """

    @abstractmethod
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
        """Return a context whose body is one span; the arguments are the fields of `Span`.

        On a device, work that the body gives to the current stream is the span: for copies on a stream of
        their own, `with torch.cuda.stream(copies), recorder.span(Kind.COPY, lane=Lane.COPY): ...`.
        """

    @abstractmethod
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
        """Start a span now; `OpenSpan.close` ends it.

        On a device it starts when the current stream comes to it, and ends when the stream does that is
        current where it is closed.
        """

    @abstractmethod
    def step(self, index: int) -> AbstractContextManager[None]:
        """Return the context of one training step. If an exception leaves it, no step is recorded."""

    @abstractmethod
    def close(self) -> None:
        """Write what is still buffered; spans recorded later are lost."""


class FileRecorder(Recorder):
    """Record spans into the timeline file of a rank.

    The spans of a step are kept or dropped together, as `step_is_kept` says, so that the file of a long
    run stays small; spans outside steps are always kept.

    Args:
        new_span: Makes a span from its kind, lane, name, bytes, group and purpose.
        marks: Marks to make with each span of `span`, also with those that are dropped.
    """

    def __init__(self, new_span: Callable[..., Any], marks: Marks | None = None) -> None:
        self._new_span = new_span
        self._marks = Marks() if marks is None else marks
        self._in_dropped_step = False

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
        span: AbstractContextManager[None] = (
            DROPPED if self._in_dropped_step else self._new_span(kind, lane, name, bytes, group, purpose)
        )
        if self._marks.new is None:
            return span
        return Marked(span, self._marks.new(f"{kind} {name}".rstrip()))

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
        return Started(self._new_span(kind, lane, name, bytes, group, purpose))


@final
class SpanRecorder(FileRecorder):
    """Record the spans of a rank whose host computes; their times are the host's.

    A file that cannot be written is reported once, and the run goes on without it.

    Args:
        path: The timeline file of the rank; a resumed run appends to it.
        rank: The global rank.
        say: Called with the report of a failure to write, one line.
        marks: See `FileRecorder`.
        first: See `SpanFile`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        rank: int,
        *,
        say: Callable[[str], object] = warnings.warn,
        marks: Marks | None = None,
        first: int = 0,
    ) -> None:
        self._file = SpanFile(path, rank, say, first)
        super().__init__(partial(_TimedSpan, self._file.spans.append), marks)

    def step(self, index: int) -> AbstractContextManager[None]:
        """See `Recorder.step`."""
        return _TimedStep(self, index)

    def close(self) -> None:
        """See `Recorder.close`."""
        self._file.close()

    def _enter_step(self, index: int) -> None:
        self._in_dropped_step = not step_is_kept(index)

    def _leave_step(self, index: int, start: float, *, finished: bool) -> None:
        now = time.perf_counter()
        if finished and not self._in_dropped_step:
            what = Kind.STEP, Lane.COMPUTE, str(index)
            self._file.spans.append((*what, start, now - start, 0, (), "", "", None))
        self._in_dropped_step = False
        self._file.flush_if_due(now)


@final
class NullRecorder(Recorder):
    """Record nothing, for runs without a timeline."""

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
        return DROPPED

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
        return DROPPED

    def step(self, index: int) -> AbstractContextManager[None]:
        """See `Recorder.step`."""
        return DROPPED

    def close(self) -> None:
        """See `Recorder.close`."""


def step_is_kept(index: int) -> bool:
    """Return whether the spans of a step are kept.

    All steps below 1,000 are kept, then one in ten below 10,000, one in a hundred below 100,000 and so on:
    900 steps for each power of ten.
    """
    stride, limit = 1, 1_000
    while index >= limit:
        stride, limit = stride * 10, limit * 10
    return index % stride == 0


class _TimedSpan:
    """Append its fields when the `with` ends. Slots and no generator: this code runs for every span."""

    __slots__ = ("_append", "_bytes", "_group", "_kind", "_lane", "_name", "_purpose", "_start")

    def __init__(
        self,
        append: Callable[[Fields], None],
        kind: str,
        lane: str,
        name: str,
        bytes: int,
        group: tuple[int, ...],
        purpose: str,
    ) -> None:
        self._append = append
        self._kind = kind
        self._lane = lane
        self._name = name
        self._bytes = bytes
        self._group = group
        self._purpose = purpose

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.finish(None, "")

    start = __enter__

    def finish(self, at: float | None, algorithm: str) -> None:
        duration = max((time.perf_counter() if at is None else at) - self._start, 0.0)
        what = self._kind, self._lane, self._name
        sizes = self._bytes, self._group
        self._append((*what, self._start, duration, *sizes, algorithm, self._purpose, None))


@final
class Started(OpenSpan):
    """A span that starts when this is made; its lock lets only one of several closing threads through.

    Args:
        span: The span, with methods `start()` and `finish(at, algorithm)`.
    """

    __slots__ = ("_once", "_span")

    def __init__(self, span: Any) -> None:
        self._once = threading.Lock()
        self._span = span
        span.start()

    def close(self, at: float | None = None, algorithm: str = "") -> None:
        """See `OpenSpan.close`."""
        if self._once.acquire(blocking=False):
            self._span.finish(at, algorithm)


class _TimedStep:
    """The context of `SpanRecorder.step`."""

    __slots__ = ("_index", "_recorder", "_start")

    def __init__(self, recorder: SpanRecorder, index: int) -> None:
        self._recorder = recorder
        self._index = index

    def __enter__(self) -> None:
        self._recorder._enter_step(self._index)
        self._start = time.perf_counter()

    def __exit__(self, error_type: type[BaseException] | None, *others: object) -> None:
        self._recorder._leave_step(self._index, self._start, finished=error_type is None)


class _DroppedSpan(OpenSpan):
    """Stand for every span that is not recorded; it has no state, so one object serves all."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def close(self, at: float | None = None, algorithm: str = "") -> None:
        pass


DROPPED = _DroppedSpan()
