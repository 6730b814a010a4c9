"""The figures of each collective of a step by its whole name, such as the all-reduce of one bucket.

A collective's span begins when a rank starts it. It is under way once the last rank has started it and the
collectives that were started before it in its group have ended: ranks do these one after another. So the
seconds of a group's collectives do not overlap, and their sum is what a model of single collectives predicts.
They are exposed while the rank neither computes nor waits for data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from shoal.timeline.breakdown import explain
from shoal.timeline.intervals import Interval, Intervals, length, subtract, union
from shoal.timeline.launch import WORK, blocked_in
from shoal.timeline.matching import Arrival, match_collectives
from shoal.timeline.span import Kind, Lane, Span
from shoal.timeline.timeline import Timeline
from shoal.timeline.windows import StepWindows


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
