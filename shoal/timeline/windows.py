"""The time of each step of one rank, and the steps that a span lies in."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from shoal.timeline.intervals import Interval
from shoal.timeline.span import Span
from shoal.timeline.timeline import Timeline

Item = TypeVar("Item")


class StepWindows(Mapping[int, Interval]):
    """The [start, stop) of each step that a rank finished, by index, in order of time.

    The steps of a rank follow one another: their windows do not overlap. If a resumed run repeated a step,
    the last time counts.
    """

    def __init__(self, timeline: Timeline, rank: int) -> None:
        found = (timeline.step(rank, index) for index in timeline.steps())
        spans = sorted((span for span in found if span is not None), key=lambda span: span.start)
        self._windows = {int(span.name): (span.start, span.stop) for span in spans}
        self._indices = list(self._windows)
        self._starts = [start for start, _ in self._windows.values()]
        self._stops = [stop for _, stop in self._windows.values()]

    def __getitem__(self, index: int) -> Interval:
        return self._windows[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._windows)

    def __len__(self) -> int:
        return len(self._windows)

    def started_in(self, span: Span) -> int | None:
        """Return the index of the step in which a span starts; None between steps."""
        position = bisect.bisect_right(self._stops, span.start)
        if position < len(self._starts) and self._starts[position] <= span.start:
            return self._indices[position]
        return None

    def share_out(self, items: Iterable[tuple[Span, Item]]) -> dict[int, list[Item]]:
        """Return the items in each step, wholly or in part; an item's span gives its time."""
        shares: dict[int, list[Item]] = {index: [] for index in self}
        for span, item in items:
            position = bisect.bisect_right(self._stops, span.start)
            while position < len(self._starts) and (
                self._starts[position] < span.stop or self._starts[position] == span.start
            ):
                shares[self._indices[position]].append(item)
                position += 1
        return shares
