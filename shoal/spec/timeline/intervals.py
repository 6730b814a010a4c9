"""Set operations on times, as sorted lists of disjoint half-open intervals [start, stop).

`union` makes such a list from any intervals; the other functions take and return such lists, each in one
pass. Nothing is rounded: every bound of a result is a bound of an argument.

Match the spans of different ranks that are one collective, and find when its last member arrived.

A collective appears once on each rank of its group. Ranks run the same program, so its spans are found
by (group, name) and by order: the k-th span of that group and name that starts within a step, on every
rank. A rank that arrives early waits for the last one; no network could make that time shorter.

Several may run at once: a message that was requested long ago, and the collective that a rank waits for now.
A wait belongs to the collectives with its own name.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from shoal.spec.timeline.span import Kind, Lane, Span
from shoal.spec.timeline.timeline import Timeline

Interval = tuple[float, float]
Intervals = list[Interval]


def union(intervals: Iterable[Interval]) -> Intervals:
    """Return the times in any of the intervals, which may be unordered and overlap; empty ones vanish."""
    merged: Intervals = []
    for start, stop in sorted(intervals):
        if start >= stop:
            continue
        if merged and start <= merged[-1][1]:
            if stop > merged[-1][1]:
                merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged


def intersect(left: Sequence[Interval], right: Sequence[Interval]) -> Intervals:
    """Return the times in both."""
    common: Intervals = []
    i = j = 0
    while i < len(left) and j < len(right):
        start = max(left[i][0], right[j][0])
        stop = min(left[i][1], right[j][1])
        if start < stop:
            common.append((start, stop))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return common


def subtract(left: Sequence[Interval], right: Sequence[Interval]) -> Intervals:
    """Return the times in `left` and not in `right`."""
    rest: Intervals = []
    j = 0
    for start, stop in left:
        while j < len(right) and right[j][1] <= start:
            j += 1
        k = j
        while k < len(right) and right[k][0] < stop:
            if start < right[k][0]:
                rest.append((start, right[k][0]))
            start = right[k][1]
            k += 1
        if start < stop:
            rest.append((start, stop))
    return rest


def length(intervals: Sequence[Interval]) -> float:
    """Return the total length of the intervals, in seconds."""
    return sum(stop - start for start, stop in intervals)


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


@dataclass(frozen=True, slots=True)
class Arrival:
    """A rank's span in a collective, and the time at which the whole group had arrived.

    Attributes:
        span: The collective on this rank.
        step: The index of the step in which it starts.
        complete: Time at which the last member of the group started it, within the span; the start of the
            span if the spans of other members are missing.
    """

    span: Span
    step: int
    complete: float


@dataclass(frozen=True, slots=True)
class Meeting:
    """One collective, with the span of each rank in it. A rank arrives at the start of its span.

    Attributes:
        step: The index of the step in which it starts.
        group: Global ranks that take part.
        name: Name of its spans.
        occurrence: Number of collectives of this group and name before it in the step.
        spans: The span of each rank.
        is_whole: Whether all of the group are here, and from one run of the step.
    """

    step: int
    group: tuple[int, ...]
    name: str
    occurrence: int
    spans: Mapping[int, Span]
    is_whole: bool

    @property
    def complete(self) -> float:
        """Return the time at which the last rank arrived."""
        return max(span.start for span in self.spans.values())


_Key = tuple[int, tuple[int, ...], str, int]
"""The fields that all spans of one collective share: step, group, name, occurrence."""


def meetings(timeline: Timeline, windows: Mapping[int, StepWindows]) -> list[Meeting]:
    """Return the collectives that start within steps, each with the spans of all ranks that are known.

    Args:
        timeline: Timeline of all ranks.
        windows: The steps of each rank to look at.
    """
    members: dict[_Key, dict[int, Span]] = {}
    for rank, steps in windows.items():
        for key, span in _keyed(timeline.of(rank), steps):
            members.setdefault(key, {})[rank] = span
    return [
        Meeting(
            *key,
            spans=spans,
            is_whole=set(spans) == set(key[1]) and _overlap([windows[rank][key[0]] for rank in spans]),
        )
        for key, spans in members.items()
    ]


def match_collectives(timeline: Timeline, windows: Mapping[int, StepWindows]) -> dict[int, list[Arrival]]:
    """Return the collectives that start within steps, for each rank, in order of time.

    Args:
        timeline: Timeline of all ranks.
        windows: The steps of each rank to look at.
    """
    arrivals: dict[int, list[Arrival]] = {rank: [] for rank in windows}
    for meeting in meetings(timeline, windows):
        complete = meeting.complete
        for rank, span in meeting.spans.items():
            together = min(span.stop, complete) if meeting.is_whole else span.start
            arrivals[rank].append(Arrival(span, meeting.step, together))
    for found in arrivals.values():
        found.sort(key=lambda arrival: arrival.span.start)
    return arrivals


def moments_of_lateness(spans: Iterable[Span], arrivals: Iterable[Arrival]) -> Intervals:
    """Return the times in which not all members had started what a rank waits for.

    Within a wait, these are collectives with the wait's name. Without a wait, or without a collective of its
    name, all running collectives count.

    Args:
        spans: Spans of one rank.
        arrivals: The collectives of that rank.
    """
    incomplete: dict[str, list[Interval]] = {}
    for arrival in arrivals:
        incomplete.setdefault(arrival.span.name, []).append((arrival.span.start, arrival.complete))
    waits: dict[str, list[Interval]] = {name: [] for name in incomplete}
    for span in spans:
        if span.lane == Lane.COMPUTE and span.kind in (Kind.WAIT, Kind.COLLECTIVE) and span.name in waits:
            waits[span.name].append((span.start, span.stop))
    waited = union(each for moments in waits.values() for each in moments)
    late = subtract(union(each for moments in incomplete.values() for each in moments), waited)
    for name, moments in waits.items():
        late += intersect(union(moments), union(incomplete[name]))
    return union(late)


def _keyed(spans: Iterable[Span], windows: StepWindows) -> list[tuple[_Key, Span]]:
    seen: Counter[tuple[int, tuple[int, ...], str]] = Counter()
    keyed = []
    for span in spans:
        if span.kind != Kind.COLLECTIVE or (step := windows.started_in(span)) is None:
            continue
        occurrence = seen[step, span.group, span.name]
        seen[step, span.group, span.name] += 1
        keyed.append(((step, span.group, span.name, occurrence), span))
    return keyed


def _overlap(windows: list[Interval]) -> bool:
    """Return whether the ranks ran the step together; after a crash, they may have it from different runs."""
    return max(start for start, _ in windows) < min(stop for _, stop in windows)
