"""The seconds of each step by kind of span and by collective, to compare two runs step by step.

The figures of each collective of a step by its whole name, such as the all-reduce of one bucket.

A collective's span begins when a rank starts it. It is under way once the last rank has started it and the
collectives that were started before it in its group have ended: ranks do these one after another. So the
seconds of a group's collectives do not overlap, and their sum is what a model of single collectives predicts.
They are exposed while the rank neither computes nor waits for data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from shoal.spec.timeline.breakdown import WORK, RankBreakdown, blocked_in, explain, stopped_in
from shoal.spec.timeline.intervals import (
    Arrival,
    Interval,
    Intervals,
    StepWindows,
    intersect,
    length,
    match_collectives,
    moments_of_lateness,
    subtract,
    union,
)
from shoal.spec.timeline.span import Kind, Lane, Purpose, Span
from shoal.spec.timeline.timeline import Timeline

PARTS = ("exposed_communication", "bubble", "straggler_wait", "data_wait", "file_wait", "launch", "other")
"""Names of `Parts` that are kinds too."""


def seconds_by_kind(timeline: Timeline) -> dict[str, float]:
    """Return the seconds of a rank's step by kind, as the mean over ranks.

    "forward", "backward" and "optimizer" are without their waits, each the median over the steps that the
    Breakdown counts; launch within them is in them too. "exposed_communication", "bubble", "straggler_wait",
    "data_wait", "file_wait", "launch" and "other" are its parts. Each `Purpose` is the time that compute
    waits for it once all of its group have arrived: most of the exposed communication. "collective" is all
    communication once all of a group have arrived, hidden or not; "step" is the whole.

    Raises:
        ShoalError: No rank finished a step.
    """
    breakdown = explain(timeline)
    windows = {rank.rank: StepWindows(timeline, rank.rank) for rank in breakdown.ranks}
    arrivals = match_collectives(timeline, windows)
    by_rank = [_kinds_of_rank(timeline, rank, arrivals[rank.rank]) for rank in breakdown.ranks]
    return {kind: fmean(seconds[kind] for seconds in by_rank) for kind in by_rank[0]}


def _kinds_of_rank(timeline: Timeline, rank: RankBreakdown, arrivals: Sequence[Arrival]) -> dict[str, float]:
    windows = StepWindows(timeline, rank.rank)
    spans_in = windows.share_out((span, span) for span in timeline.of(rank.rank))
    arrivals_in = windows.share_out((arrival.span, arrival) for arrival in arrivals)
    steps = [kinds_of_step(windows[at], spans_in[at], arrivals_in[at]) for at in rank.counted]
    seconds = {str(kind): median(step[kind] for step in steps) for kind in WORK}
    for name in PARTS:
        seconds[name] = getattr(rank.parts, name) or 0.0
        if name == "exposed_communication":
            seconds |= {str(purpose): fmean(step[purpose] for step in steps) for purpose in Purpose}
    seconds["step"] = rank.parts.wall
    seconds["collective"] = sum(figures.transfer_seconds for figures in rank.collectives.values())
    return seconds


def kinds_of_step(window: Interval, spans: Sequence[Span], arrivals: Sequence[Arrival]) -> dict[str, float]:
    """Return the seconds of one step of a rank by kind of work and by `Purpose`, and of all collectives.

    Args:
        window: The start and the end of the step.
        spans: The rank's spans that lie in the step, wholly or in part.
        arrivals: The rank's collectives that lie in the step.
    """

    def seconds(moments: Intervals) -> float:
        return length(intersect(moments, [window]))

    blocked, stopped = blocked_in(spans), stopped_in(spans)
    bubbles = _moments(span for span in spans if span.kind == Kind.BUBBLE)
    explained = union([*moments_of_lateness(spans, arrivals), *bubbles])
    found = {
        str(kind): seconds(subtract(_moments(span for span in spans if span.kind == kind), stopped))
        for kind in WORK
    }
    waits = [
        span for span in spans if span.lane == Lane.COMPUTE and span.kind in (Kind.WAIT, Kind.COLLECTIVE)
    ]
    for purpose in Purpose:
        waited = intersect(_moments(span for span in waits if span.purpose == purpose), blocked)
        found[str(purpose)] = seconds(subtract(waited, explained))
    started = (arrival for arrival in arrivals if window[0] <= arrival.span.start < window[1])
    found["collective"] = sum(arrival.span.stop - arrival.complete for arrival in started)
    return found


def _moments(spans: Iterable[Span]) -> Intervals:
    return union((span.start, span.stop) for span in spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCollective:
    """A collective of a step, which may happen several times in one. Numbers are of a step, means over ranks.

    Attributes:
        name: Its operation and what it moves, such as "all_reduce:bucket 3".
        purpose: One of `Purpose`.
        algorithms: Its algorithms, ascending; empty if the backend does not report them.
        ranks: Number of ranks that take part.
        count: How often it happens.
        bytes: Bytes that it carries, as in `Span.bytes`.
        seconds: Seconds under way.
        exposed_seconds: Seconds of these that nothing overlaps.
    """

    name: str
    purpose: str
    algorithms: tuple[str, ...]
    ranks: int
    count: float
    bytes: float
    seconds: float
    exposed_seconds: float


@dataclass(slots=True)
class _Found:
    spans: list[Span] = field(default_factory=list)
    seconds: float = 0.0
    exposed: float = 0.0


def named_collectives(timeline: Timeline) -> list[NamedCollective]:
    """Return the collectives of the steps that `explain` counts, in the order in which they first start.

    Raises:
        ShoalError: No rank finished a step.
    """
    ranks = explain(timeline).ranks
    windows = {rank.rank: StepWindows(timeline, rank.rank) for rank in ranks}
    arrivals = match_collectives(timeline, windows)
    found: dict[str, _Found] = {}
    for rank in ranks:
        steps = windows[rank.rank]
        spans = steps.share_out((span, span) for span in timeline.of(rank.rank))
        started: dict[int, list[Arrival]] = {index: [] for index in rank.counted}
        for arrival in arrivals[rank.rank]:
            if arrival.step in started:
                started[arrival.step].append(arrival)
        for index, of_step in started.items():
            occupied = _occupied(spans[index])
            for span, under_way in one_after_another(of_step):
                each = found.setdefault(span.name, _Found())
                each.spans.append(span)
                each.seconds += length(under_way)
                each.exposed += length(subtract(under_way, occupied))
    share = 1 / (len(ranks) * fmean(len(rank.counted) for rank in ranks))
    return [
        NamedCollective(
            name=name,
            purpose=each.spans[-1].purpose,
            algorithms=tuple(sorted({span.algorithm for span in each.spans} - {""})),
            ranks=len(each.spans[-1].group),
            count=len(each.spans) * share,
            bytes=sum(span.bytes for span in each.spans) * share,
            seconds=each.seconds * share,
            exposed_seconds=each.exposed * share,
        )
        for name, each in found.items()
    ]


def _occupied(spans: Sequence[Span]) -> Intervals:
    """Return the times in which a rank computes, waits for data, or has nothing to do by its schedule."""

    def moments(kinds: Iterable[str]) -> Intervals:
        chosen = tuple(kinds)
        return union(
            (span.start, span.stop) for span in spans if span.lane == Lane.COMPUTE and span.kind in chosen
        )

    compute = subtract(moments(WORK), blocked_in(spans))
    return union(compute + moments((Kind.DATA_WAIT, Kind.BUBBLE)))


def one_after_another(arrivals: Sequence[Arrival]) -> Iterator[tuple[Span, list[Interval]]]:
    """Yield the collectives of a step, each with the time in which it is under way."""
    ended: dict[tuple[int, ...], float] = {}
    for arrival in sorted(arrivals, key=lambda arrival: arrival.span.start):
        span = arrival.span
        begin = max(arrival.complete, ended.get(span.group, arrival.complete))
        ended[span.group] = max(span.stop, ended.get(span.group, span.stop))
        yield span, [(begin, span.stop)] if begin < span.stop else []


Series = dict[str, dict[int, float]]
"""Seconds by name and by index of a step."""


def kind_series(timeline: Timeline) -> Series:
    """Return the seconds of each step by kind, as means over the ranks.

    The kinds are those of `shoal.spec.timeline.series`. Steps that not every rank finished are left out.

    Raises:
        ShoalError: No rank finished a step.
    """
    breakdown = explain(timeline)
    windows = {rank.rank: StepWindows(timeline, rank.rank) for rank in breakdown.ranks}
    arrivals = match_collectives(timeline, windows)
    return _means(
        [
            _series_of_rank(timeline.of(rank.rank), rank, windows[rank.rank], arrivals[rank.rank])
            for rank in breakdown.ranks
        ]
    )


def collective_series(timeline: Timeline) -> Series:
    """Return the seconds for which each collective is under way in each step, as means over the ranks.

    `shoal.spec.timeline.series` says when a collective is under way. One that a step does not have
    counts as zero there.
    """
    windows = {rank: steps for rank in timeline.ranks if (steps := StepWindows(timeline, rank))}
    arrivals = match_collectives(timeline, windows)
    by_rank = []
    for rank, steps in windows.items():
        by_step: dict[int, list[Arrival]] = {index: [] for index in steps}
        for arrival in arrivals[rank]:
            by_step[arrival.step].append(arrival)
        names = {arrival.span.name for arrival in arrivals[rank]}
        found: Series = {name: dict.fromkeys(steps, 0.0) for name in sorted(names)}
        for index, of_step in by_step.items():
            for span, under_way in one_after_another(of_step):
                found[span.name][index] += length(under_way)
        by_rank.append(found)
    return _means(by_rank)


def step_starts(timeline: Timeline) -> dict[int, float]:
    """Return when each step that every rank finished began on the first rank: wall-clock seconds."""
    windows = [steps for rank in timeline.ranks if (steps := StepWindows(timeline, rank))]
    common = set.intersection(*map(set, windows)) if windows else set()
    return {step: timeline.origin_unix_ns / 1e9 + windows[0][step][0] for step in sorted(common)}


def _means(by_rank: Sequence[Series]) -> Series:
    """Return the means over the ranks that have a name, in the steps that each of them finished."""
    means: Series = {}
    for name in dict.fromkeys(name for series in by_rank for name in series):
        having = [series[name] for series in by_rank if name in series]
        steps = sorted(set.intersection(*(set(values) for values in having)))
        means[name] = {index: fmean(values[index] for values in having) for index in steps}
    return means


def _series_of_rank(
    spans: Sequence[Span], rank: RankBreakdown, windows: StepWindows, arrivals: Sequence[Arrival]
) -> Series:
    spans_in = windows.share_out((span, span) for span in spans)
    arrivals_in = windows.share_out((arrival.span, arrival) for arrival in arrivals)
    series: Series = {}
    for index in sorted(windows):
        of_step = kinds_of_step(windows[index], spans_in[index], arrivals_in[index])
        parts = rank.steps[index]
        of_step |= {name: getattr(parts, name) or 0.0 for name in PARTS} | {"step": parts.wall}
        for name, seconds in of_step.items():
            series.setdefault(name, {})[index] = seconds
    return series
