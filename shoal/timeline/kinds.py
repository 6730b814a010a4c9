"""Seconds of a step by kind of span: what a prediction and a run are compared by."""

from __future__ import annotations

from statistics import median

from shoal.timeline.breakdown import explain
from shoal.timeline.intervals import intersect, length, subtract, union
from shoal.timeline.span import Kind, Lane
from shoal.timeline.timeline import Timeline

__all__ = ["seconds_by_kind"]

_WORK = (Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER)


def seconds_by_kind(timeline: Timeline) -> dict[str, float]:
    """Seconds of a step of a rank, by kind: each the median over its counted steps, then the mean over ranks.

    "forward", "backward" and "optimizer" are without what they wait for. "exposed_communication", "bubble"
    and "straggler_wait" are those of the Breakdown, whose `counted` says which steps count; "collective" is
    all communication once all of a group were there, hidden or not; "step" is the whole.

    Raises:
        ShoalError: No rank finished a step.
    """
    breakdown = explain(timeline)
    totals: dict[str, float] = {}
    for rank in breakdown.ranks:
        spans = timeline.of(rank.rank)
        blocked = union(
            (span.start, span.stop)
            for span in spans
            if span.lane == Lane.COMPUTE and span.kind in (Kind.WAIT, Kind.COLLECTIVE)
        )
        for kind in _WORK:
            worked = subtract(union((span.start, span.stop) for span in spans if span.kind == kind), blocked)
            by_step = []
            for index in rank.counted:
                step = timeline.step(rank.rank, index)
                assert step is not None
                by_step.append(length(intersect(worked, [(step.start, step.stop)])))
            totals[kind] = totals.get(kind, 0.0) + median(by_step)
    for name in ("exposed_communication", "bubble", "straggler_wait"):
        totals[name] = sum(getattr(rank.parts, name) for rank in breakdown.ranks)
    totals["collective"] = sum(
        figures.transfer_seconds for rank in breakdown.ranks for figures in rank.collectives.values()
    )
    totals["step"] = sum(rank.parts.wall for rank in breakdown.ranks)
    return {str(kind): seconds / len(breakdown.ranks) for kind, seconds in totals.items()}
