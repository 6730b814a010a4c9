"""The Breakdown: where the time went, for each step, each rank and over all ranks.

Launch: the time in which a device idles because the host has not given it the next work yet.

Between the spans of a step it is a gap: until the host gives the device the start of the next span, the
device has nothing to do.

Within a span, which may be a thousand kernels, no gap shows. There it is the span's time less the *own* time
of the same work: what the work takes if all of it is given before the device comes to it, as in the held
steps that the recorder makes. It is never more than the time until the host had given the whole span: work
that is slower for another reason does not count while the host is ahead. In a held step the host may be
unable to get far enough ahead: CUDA takes about 1,024 launches, and some work asks the device for a value.
Then own time is too long and launch too short.

Work of a step is matched by kind, name and order. Waits for collectives are in neither time.

The parts of the time of one rank's step: disjoint parts that sum to its wall time.

With sets of times:

    blocked   = wait spans and collectives on the compute lane
    file wait = file-wait spans, without blocked
    compute   = forward, backward and optimizer spans on the compute lane, without blocked and file wait
    data wait = data-wait spans, without compute and file wait
    communication = everything on the communication lane, and blocked
    exposed communication = communication, without compute, data wait and file wait: nothing overlaps it
    bubble    = bubble spans, without compute, data wait and file wait; taken out of exposed communication,
                since a pipeline's idle time shows as the wait for a message
    straggler wait = the part of exposed communication before the last member of the group had started the
                     collective that is waited for; taken out of exposed communication
    other     = the rest of the step
    launch    = idle time of a device, taken out of compute and other: see `shoal.spec.timeline.breakdown`

Each part is computed from the spans, none as a remainder of numbers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean, median
from types import MappingProxyType
from typing import Any, TypeVar

from shoal.errors import ShoalError
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
from shoal.spec.timeline.span import Kind, Lane, Span
from shoal.spec.timeline.timeline import Timeline

WORK = (Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER)
"""The kinds of spans that compute."""

Work = tuple[str, str, int]
"""A span's kind, its name, and how many of these the step had before."""

NO_OWN_SECONDS: Mapping[Work, float] = MappingProxyType({})


def own_seconds(spans: Sequence[Span]) -> dict[Work, float]:
    """Return the own seconds of a rank's work: medians over its held steps."""
    found: dict[Work, list[float]] = {}
    for held in (span for span in spans if span.kind == Kind.HELD_STEP):
        inside = [span for span in spans if span.stop > held.start and span.start < held.stop]
        for work, _, busy in _works((held.start, held.stop), inside, stopped_in(inside)):
            found.setdefault(work, []).append(length(busy))
    return {work: median(seconds) for work, seconds in found.items()}


def launch_in_work(
    window: Interval, spans: Iterable[Span], stopped: Intervals, own: Mapping[Work, float]
) -> float:
    """Return the seconds of launch within the work of a step.

    Args:
        window: The start and the end of the step.
        spans: The spans of one rank that lie in the step, wholly or in part.
        stopped: The times in which its compute is blocked, or waits for files.
        own: The result of `own_seconds`.
    """
    total = 0.0
    for work, span, busy in _works(window, spans, stopped):
        if work in own and span.host is not None:
            until_given = length(intersect(busy, [(span.start, span.host[1])]))
            total += min(max(length(busy) - own[work], 0.0), until_given)
    return total


def launch_in_gaps(gaps: Intervals, spans: Iterable[Span]) -> Intervals:
    """Return the times of launch between the spans of a step.

    Args:
        gaps: The times of the step that no span explains.
        spans: The spans of one rank in the step, with that of the step.
    """
    bounds = sorted(
        bound
        for span in spans
        if span.lane == Lane.COMPUTE and span.host is not None
        for bound in ((span.start, span.host[0]), (span.stop, span.host[1]))
    )
    launch = []
    for start, stop in gaps:
        after = bisect_left(bounds, (stop,))
        if after < len(bounds):
            launch.append((start, min(stop, bounds[after][1])))
    return union(launch)


def blocked_in(spans: Sequence[Span]) -> Intervals:
    """Return the times in which the compute lane is blocked on collectives.

    On a device a wait lasts no longer than the collectives: in what is left of its span, the device idles
    until the host has given it the end of the wait.
    """
    waits = [
        span for span in spans if span.lane == Lane.COMPUTE and span.kind in (Kind.WAIT, Kind.COLLECTIVE)
    ]
    blocked = union((span.start, span.stop) for span in waits)
    if all(span.host is None for span in waits):
        return blocked
    return intersect(
        blocked, union((span.start, span.stop) for span in spans if span.lane == Lane.COMMUNICATION)
    )


def stopped_in(spans: Sequence[Span]) -> Intervals:
    """Return the times in which the compute lane is blocked on collectives, or waits for files."""
    files = (
        (span.start, span.stop) for span in spans if span.lane == Lane.COMPUTE and span.kind == Kind.FILE_WAIT
    )
    return union([*blocked_in(spans), *files])


def _works(
    window: Interval, spans: Iterable[Span], stopped: Intervals
) -> Iterator[tuple[Work, Span, Intervals]]:
    """Yield each span that computes in a step, by start, with the times in which it is not stopped."""
    seen: Counter[tuple[str, str]] = Counter()
    for span in spans:
        # Work of the next step may start where this one ends, to within rounding: its middle tells.
        is_inside = window[0] <= (span.start + span.stop) / 2 < window[1]
        if is_inside and span.kind in WORK and span.lane == Lane.COMPUTE:
            what = span.kind, span.name
            yield (*what, seen[what]), span, subtract([(span.start, span.stop)], stopped)
            seen[what] += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of the time of one step, or of an average step, in seconds.

    The first eight are disjoint and sum to `wall`.

    Attributes:
        compute: Forward, backward and optimizer, while not blocked.
        launch: Idle time of the device because the host had not given it the next work yet; None if the host
            itself computes, or if the Timeline is predicted.
        exposed_communication: Communication that nothing overlaps and that no late rank explains.
        bubble: Idle time that the pipeline schedule forces.
        data_wait: Waiting for input data.
        file_wait: Waiting for files of offloaded state; None if the Timeline has no such wait.
        straggler_wait: Exposed communication before the last rank of a collective's group started it.
        other: Time that no span explains.
        wall: The step, from start to end.
        communication: All communication, overlapped or not.
        overlapped_communication: Communication during which the rank computes, or waits for data or files.
        bytes: Bytes of the collectives that start in the step.
    """

    compute: float
    launch: float | None = None
    exposed_communication: float
    bubble: float
    data_wait: float
    file_wait: float | None = None
    straggler_wait: float
    other: float
    wall: float
    communication: float
    overlapped_communication: float
    bytes: float

    def disjoint(self) -> dict[str, float]:
        """The parts that sum to `wall`, by name, in seconds; without those that are None."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)[:8]}
        return {name: seconds for name, seconds in parts.items() if seconds is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveFigures:
    """The figures of one operation, per rank and step.

    Attributes:
        count: Number of them that start.
        bytes: Bytes that they carry, as in `Span.bytes`.
        seconds: Sum of their durations.
        exposed_seconds: Exposed communication that they cover; operations that run at one time cover it
            together.
        transfer_seconds: Sum of their durations after the whole group had arrived.
    """

    count: float
    bytes: float
    seconds: float
    exposed_seconds: float
    transfer_seconds: float

    @property
    def algbw(self) -> float | None:
        """Bytes/s while the whole group was there, as in nccl-tests; None if no time passed."""
        return self.bytes / self.transfer_seconds if self.transfer_seconds > 0 else None


Figures = TypeVar("Figures", Parts, CollectiveFigures)

_NO_COLLECTIVES = CollectiveFigures(count=0, bytes=0, seconds=0, exposed_seconds=0, transfer_seconds=0)


def mean(figures: Sequence[Figures]) -> Figures:
    """Return the mean of one or more, field by field; None counts as zero, unless all are None."""
    kind = type(figures[0])
    by_name: dict[str, list[Any]] = {
        field.name: [getattr(each, field.name) for each in figures] for field in fields(kind)
    }
    means: dict[str, Any] = {
        name: None if all(each is None for each in values) else fmean(each or 0.0 for each in values)
        for name, values in by_name.items()
    }
    return kind(**means)


def mean_by_operation(figures: Sequence[Mapping[str, CollectiveFigures]]) -> dict[str, CollectiveFigures]:
    """Return the mean of each operation, by name; an absent one counts as zero."""
    operations = sorted({operation for each in figures for operation in each})
    return {
        operation: mean([each.get(operation, _NO_COLLECTIVES) for each in figures])
        for operation in operations
    }


def explain_step(
    window: Interval,
    spans: Sequence[Span],
    arrivals: Sequence[Arrival],
    own: Mapping[Work, float] = NO_OWN_SECONDS,
) -> tuple[Parts, dict[str, CollectiveFigures]]:
    """Return the parts of the time of one rank's step, and the figures of each operation.

    Args:
        window: The start and the end of the step.
        spans: The rank's spans that lie in the step, wholly or in part.
        arrivals: The rank's collectives that lie in the step.
        own: Seconds of a device's own work: the result of `own_seconds`.
    """
    whole = [window]

    def moments(kinds: Collection[str], lane: str) -> Intervals:
        chosen = ((span.start, span.stop) for span in spans if span.kind in kinds and span.lane == lane)
        return intersect(whole, union(chosen))

    blocked = intersect(whole, blocked_in(spans))
    file_wait = subtract(moments((Kind.FILE_WAIT,), Lane.COMPUTE), blocked)
    stopped = union(blocked + file_wait)
    compute = subtract(moments(WORK, Lane.COMPUTE), stopped)
    data_wait = subtract(moments((Kind.DATA_WAIT,), Lane.COMPUTE), union(compute + file_wait))
    occupied = union(compute + data_wait + file_wait)
    communication = union(blocked + moments(tuple(Kind), Lane.COMMUNICATION))
    bubble = subtract(moments((Kind.BUBBLE,), Lane.COMPUTE), occupied)
    unhidden = subtract(communication, union(occupied + bubble))
    late = moments_of_lateness(spans, arrivals)
    exposed = subtract(unhidden, late)
    unexplained = subtract(whole, union(occupied + communication + bubble))

    launch = None
    in_work = 0.0
    in_gaps: Intervals = []
    if any(span.host is not None for span in spans):
        in_gaps = launch_in_gaps(unexplained, spans)
        in_work = launch_in_work(window, spans, stopped, own)
        launch = in_work + length(in_gaps)

    started = [arrival for arrival in arrivals if window[0] <= arrival.span.start < window[1]]
    parts = Parts(
        compute=length(compute) - in_work,
        launch=launch,
        exposed_communication=length(exposed),
        bubble=length(bubble),
        data_wait=length(data_wait),
        file_wait=length(file_wait) if file_wait else None,
        straggler_wait=length(intersect(unhidden, late)),
        other=length(subtract(unexplained, in_gaps)),
        wall=length(whole),
        communication=length(communication),
        overlapped_communication=length(intersect(communication, occupied)),
        bytes=sum(arrival.span.bytes for arrival in started),
    )
    return parts, _by_operation(started, spans, exposed)


def _by_operation(
    started: Sequence[Arrival], spans: Sequence[Span], exposed: Intervals
) -> dict[str, CollectiveFigures]:
    grouped: dict[str, list[Arrival]] = {}
    for arrival in started:
        grouped.setdefault(_operation(arrival.span), []).append(arrival)
    covered: dict[str, list[Interval]] = {}
    for span in spans:
        if span.kind in (Kind.COLLECTIVE, Kind.WAIT):
            covered.setdefault(_operation(span), []).append((span.start, span.stop))
    return {
        operation: CollectiveFigures(
            count=len(members),
            bytes=sum(arrival.span.bytes for arrival in members),
            seconds=sum(arrival.span.duration for arrival in members),
            exposed_seconds=length(intersect(exposed, union(covered[operation]))),
            transfer_seconds=sum(arrival.span.stop - arrival.complete for arrival in members),
        )
        for operation, members in grouped.items()
    }


def _operation(span: Span) -> str:
    return span.name.partition(":")[0]


_WARM_UP_STEPS = 2
_FEWEST_STEPS_AFTER_WARM_UP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBreakdown:
    """Where the time of one rank's steps went.

    Attributes:
        rank: The global rank.
        steps: The parts of each of its steps, by index.
        counted: The indices that the averages count, ascending; see `explain`.
        parts: The average over the counted steps.
        collectives: The average over the counted steps, by operation.
    """

    rank: int
    steps: Mapping[int, Parts]
    counted: tuple[int, ...]
    parts: Parts
    collectives: Mapping[str, CollectiveFigures]


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Where the time of all ranks' steps went.

    Attributes:
        ranks: Each rank that finished a step, ascending.
        parts: The mean over the ranks.
        collectives: The mean over the ranks, by operation: the part of a span's name before the colon.
    """

    ranks: tuple[RankBreakdown, ...]
    parts: Parts
    collectives: Mapping[str, CollectiveFigures]

    def of(self, rank: int) -> RankBreakdown:
        """Return the breakdown of one rank.

        Raises:
            KeyError: The rank finished no step.
        """
        for each in self.ranks:
            if each.rank == rank:
                return each
        raise KeyError(rank)


def explain(timeline: Timeline) -> Breakdown:
    """Return where the time went; `shoal.spec.timeline.breakdown` defines the parts.

    The average of a rank leaves out its first two steps, which warm up, if three or more remain. Of these it
    takes the mean over the middle half by wall time. Like a median this ignores outliers. Unlike medians of
    each part, the parts still sum to the wall time.

    Raises:
        ShoalError: No rank finished a step.
    """
    windows = {rank: steps for rank in timeline.ranks if (steps := StepWindows(timeline, rank))}
    if not windows:
        raise ShoalError("the timeline holds no finished step, so there is nothing to explain")
    arrivals = match_collectives(timeline, windows)
    ranks = tuple(
        _explain_rank(rank, steps, timeline.of(rank), arrivals[rank]) for rank, steps in windows.items()
    )
    return Breakdown(
        ranks=ranks,
        parts=mean([rank.parts for rank in ranks]),
        collectives=mean_by_operation([rank.collectives for rank in ranks]),
    )


def _explain_rank(
    rank: int, windows: StepWindows, spans: Sequence[Span], arrivals: Sequence[Arrival]
) -> RankBreakdown:
    spans_in = windows.share_out((span, span) for span in spans)
    arrivals_in = windows.share_out((arrival.span, arrival) for arrival in arrivals)
    own = own_seconds(spans)
    figures = {
        index: explain_step(windows[index], spans_in[index], arrivals_in[index], own)
        for index in sorted(windows)
    }
    steps = {index: parts for index, (parts, _) in figures.items()}
    counted = _typical_steps(steps)
    return RankBreakdown(
        rank=rank,
        steps=steps,
        counted=counted,
        parts=mean([steps[index] for index in counted]),
        collectives=mean_by_operation([figures[index][1] for index in counted]),
    )


def _typical_steps(steps: Mapping[int, Parts]) -> tuple[int, ...]:
    """Return the middle half, by wall time, of the steps after warm-up, ascending."""
    indices = sorted(steps)
    if len(indices) >= _WARM_UP_STEPS + _FEWEST_STEPS_AFTER_WARM_UP:
        indices = indices[_WARM_UP_STEPS:]
    by_wall = sorted(indices, key=lambda index: steps[index].wall)
    quarter = len(by_wall) // 4
    return tuple(sorted(by_wall[quarter : len(by_wall) - quarter]))
