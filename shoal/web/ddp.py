"""The page of a data-parallel step: the life of each bucket, on every rank, in a step that was run."""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import Any

from shoal.diagnosis.run_follower import RunFollower
from shoal.timeline import Kind, Lane, Purpose, Timeline
from shoal.timeline.breakdown import WORK, blocked_in
from shoal.timeline.intervals import Arrival, StepWindows, intersect, length, match_collectives
from shoal.web.query import Query

Collective = dict[int, Arrival]
"""One collective: by rank, its span and the time at which all had come."""


def collectives_by_step(timeline: Timeline) -> dict[int, list[Collective]]:
    """Return the collectives of each step of two or more ranks, in the order of their first start."""
    windows = {rank: steps for rank in timeline.ranks if (steps := StepWindows(timeline, rank))}
    found: dict[tuple[int, tuple[int, ...], str, int], Collective] = {}
    for rank, arrivals in match_collectives(timeline, windows).items():
        seen: Counter[tuple[int, tuple[int, ...], str]] = Counter()
        for arrival in arrivals:
            key = (arrival.step, arrival.span.group, arrival.span.name)
            found.setdefault((*key, seen[key]), {})[rank] = arrival
            seen[key] += 1
    by_step: dict[int, list[Collective]] = {}
    for (step, *_), collective in found.items():
        if len(collective) > 1:
            by_step.setdefault(step, []).append(collective)
    for collectives in by_step.values():
        collectives.sort(key=lambda each: min(arrival.span.start for arrival in each.values()))
    return by_step


def lateness(collectives: list[Collective]) -> dict[int, float]:
    """Return, by rank, the seconds by which it came after the middle rank, at the collective where most."""
    late: dict[int, float] = {}
    for collective in collectives:
        middle = median(arrival.span.start for arrival in collective.values())
        for rank, arrival in collective.items():
            late[rank] = max(late.get(rank, 0.0), arrival.span.start - middle)
    return late


_MOST_RANKS = 16
_MOST_BUCKETS = 100
_SLACK = 1e-3  # seconds after the end of a collective in which the wait for it ends
_WORK = (*WORK, Kind.DATA_WAIT)


def ddp(run: RunFollower, query: Query) -> dict[str, Any]:
    """Return what each rank did in a step, and its exchanges of gradients and weights.

    The query has "step"; the newest step by default.
    """
    run.refresh()
    last = run.files.last_step()
    if last is None:
        return {"missing": "The run has no timeline of a finished step."}
    first = run.files.first_step() or 0
    step = min(max(query.integer("step", last, 0, 1 << 53), first), last)
    timeline = run.files.steps(step, step)
    exchanged = [
        each
        for each in collectives_by_step(timeline).get(step, [])
        if next(iter(each.values())).span.purpose == Purpose.DATA
    ]
    if not exchanged:
        return {
            "missing": "No gradients were exchanged in this step: the run has one rank, or its Plan has no "
            "data parallelism, or its timeline does not name the purpose of collectives.",
            "step": step,
            "first": first,
            "last": last,
        }
    ranks = [rank for rank in timeline.ranks if timeline.step(rank, step) is not None][:_MOST_RANKS]
    zero = min(mark.start for rank in ranks if (mark := timeline.step(rank, step)) is not None)
    ended: dict[tuple[int, ...], float] = {}
    buckets = []
    for number, each in enumerate(exchanged[:_MOST_BUCKETS]):
        buckets.append(_bucket(number, each, timeline, zero, ended))
    return {
        "step": step,
        "first": first,
        "last": last,
        "all_ranks": len(timeline.ranks),
        "all_buckets": len(exchanged),
        "ranks": [_rank(timeline, rank, step, zero) for rank in ranks],
        "buckets": buckets,
    }


def _rank(timeline: Timeline, rank: int, step: int, zero: float) -> dict[str, Any]:
    mark = timeline.step(rank, step)
    assert mark is not None
    spans = [span for span in timeline.of(rank) if mark.start <= span.start < mark.stop]
    return {
        "rank": rank,
        "start": mark.start - zero,
        "stop": mark.stop - zero,
        "work": [
            [str(span.kind), span.name[:80], span.start - zero, span.stop - zero]
            for span in spans
            if span.lane == Lane.COMPUTE and span.kind in _WORK
        ],
        "blocked": length(intersect(blocked_in(spans), [(mark.start, mark.stop)])),
        "waits": [
            [span.name[:80], span.start - zero, span.stop - zero]
            for span in spans
            if span.lane == Lane.COMPUTE and span.kind == Kind.WAIT
        ],
    }


def _bucket(
    number: int, collective: Collective, timeline: Timeline, zero: float, ended: dict[tuple[int, ...], float]
) -> dict[str, Any]:
    """Return the life of one bucket: when each rank had it ready, when all had, when it was there."""
    spans = {rank: arrival.span for rank, arrival in collective.items()}
    complete = max(span.start for span in spans.values())
    group = next(iter(spans.values())).group
    begins = max(complete, ended.get(group, complete))  # one after another: the one before has to end
    stop = max(span.stop for span in spans.values())
    ended[group] = max(stop, ended.get(group, stop))
    some = next(iter(spans.values()))
    blocked = {
        rank: sum(
            wait.duration
            for wait in timeline.of(rank)
            if wait.kind == Kind.WAIT
            and wait.name == span.name
            and span.start <= wait.stop <= span.stop + _SLACK
        )
        for rank, span in spans.items()
    }
    return {
        "number": number,
        "name": some.name[:200],
        "bytes": some.bytes,
        "algorithm": some.algorithm[:40],
        "last": max(spans, key=lambda rank: spans[rank].start),
        "ready": {rank: span.start - zero for rank, span in spans.items()},
        "all_ready": complete - zero,
        "begins": min(begins, stop) - zero,
        "stops": {rank: span.stop - zero for rank, span in spans.items()},
        "blocked": blocked,
    }
