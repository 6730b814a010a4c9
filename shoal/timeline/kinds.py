"""Seconds of a step by kind of span, for the comparison of a prediction with a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean, median

from shoal.timeline.breakdown import RankBreakdown, explain
from shoal.timeline.intervals import Interval, Intervals, intersect, length, subtract, union
from shoal.timeline.launch import WORK, blocked_in, stopped_in
from shoal.timeline.matching import Arrival, match_collectives, moments_of_lateness
from shoal.timeline.span import Kind, Lane, Purpose, Span
from shoal.timeline.timeline import Timeline
from shoal.timeline.windows import StepWindows

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
    by_rank = [_of_rank(timeline, rank, arrivals[rank.rank]) for rank in breakdown.ranks]
    return {kind: fmean(seconds[kind] for seconds in by_rank) for kind in by_rank[0]}


def _of_rank(timeline: Timeline, rank: RankBreakdown, arrivals: Sequence[Arrival]) -> dict[str, float]:
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
