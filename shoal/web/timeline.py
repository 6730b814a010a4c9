"""The page of the timeline: what each rank did in a step, and what was predicted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shoal.analyze.diagnosis.run_follower import RunFollower
from shoal.errors import ShoalError
from shoal.predict.simulate import Prediction, mark_bubbles
from shoal.spec.timeline import Kind, Lane, Span, Timeline
from shoal.web.query import MOST_POINTS, Query

_LANES = (Lane.COMPUTE, Lane.COMMUNICATION, Lane.COPY, Lane.HOST)
_HIDDEN = (Kind.STEP, Kind.HELD_STEP)
_MOST_STEPS = 20
_MOST_RANKS = 64


def timeline(run: RunFollower, query: Query) -> dict[str, Any]:
    """Return the spans of some steps, no more than a page can show; and the predicted ones of a step.

    The query has "step" (the newest by default), "steps", "from" and "to" (seconds since the first step
    began, for a closer look) and "ranks" (first and last, such as 0-63).
    """
    run.refresh()
    files = run.files
    last = files.last_step()
    if last is None:
        return {"missing": "The run has no timeline of a finished step.", "step": None}
    first_step = files.first_step() or 0
    step = query.integer("step", last, 0, 1 << 53)
    step = min(max(step, first_step), last)
    count = min(query.integer("steps", 1, 1, _MOST_STEPS), last - step + 1)
    ranks = files.ranks
    begin = query.integer("rank", 0, 0, 1 << 31)
    shown = [rank for rank in ranks if rank >= begin][:_MOST_RANKS] or ranks[:_MOST_RANKS]
    found = mark_bubbles(files.steps(step, step + count - 1))
    marks = [mark for rank in found.ranks if (mark := found.step(rank, step)) is not None]
    if not marks:
        return {"missing": f"Step {step} is not in the timeline.", "step": step, "first": first_step}
    zero = min(mark.start for mark in marks)
    length = max(span.stop for span in found if span.kind == Kind.STEP) - zero
    start = query.number("from", 0.0, -1e9, 1e9)
    stop = query.number("to", length, -1e9, 1e9)
    spans, merged = shown_spans(found, shown, zero + start, zero + stop)
    return {
        "step": step,
        "steps": count,
        "first": first_step,
        "last": last,
        "all_ranks": len(ranks),
        "ranks": shown,
        "length": length,
        "from": start,
        "to": stop,
        "merged": merged,
        "marks": _marks(found, zero),
        "spans": [_row(span, zero) for span in spans],
        "predicted": _predicted(run, shown, MOST_POINTS - len(spans)),
    }


def shown_spans(
    timeline: Timeline, ranks: Iterable[int], start: float, stop: float, most: int = MOST_POINTS * 3 // 4
) -> tuple[list[Span], float]:
    """Return the spans of a window that are long enough to be seen, and the shortest length shown.

    Neighbours of one lane and kind that are shorter become one span, until there are few enough.

    Args:
        timeline: The spans.
        ranks: The ranks to show.
        start: Begin of the window, in seconds of the timeline.
        stop: End of the window.
        most: Most spans to return.
    """
    lanes: dict[tuple[int, str], list[Span]] = {}
    for rank in ranks:
        for span in timeline.of(rank):
            if span.kind not in _HIDDEN and span.stop > start and span.start < stop:
                lanes.setdefault((rank, span.lane), []).append(span)
    shortest = 0.0
    merged = [span for lane in lanes.values() for span in lane]
    while len(merged) > most:
        shortest = max(2 * shortest, (stop - start) / 4000)
        merged = [span for lane in lanes.values() for span in _merged(lane, shortest)]
        if shortest > stop - start:
            merged = merged[:most]
    return merged, shortest


def _merged(lane: list[Span], shortest: float) -> list[Span]:
    """Return a lane in which runs of short spans of one kind are one span."""
    out: list[Span] = []
    for span in lane:
        last = out[-1] if out else None
        is_near = last is not None and span.start - last.stop < shortest and span.kind == last.kind
        if last is not None and is_near and min(span.duration, last.duration) < shortest:
            stop = max(last.stop, span.stop)
            name = last.name if last.name == span.name else "several"
            out[-1] = Span(
                last.rank, last.lane, last.kind, name, last.start, stop - last.start, last.bytes + span.bytes
            )
        elif span.duration >= shortest / 2 or last is None or span.start - last.start >= shortest:
            out.append(span)
    return out


def _row(span: Span, zero: float) -> list[Any]:
    """Return [rank, lane, kind, name, start, duration, bytes, algorithm], the lane as its number."""
    lane = _LANES.index(Lane(span.lane))
    times = round(span.start - zero, 9), round(span.duration, 9)
    return [span.rank, lane, str(span.kind), span.name[:200], *times, span.bytes, span.algorithm[:40]]


def _marks(timeline: Timeline, zero: float) -> list[list[float]]:
    """Return [step, first start, last stop] of each step."""
    marks = []
    for index in timeline.steps():
        spans = [span for rank in timeline.ranks if (span := timeline.step(rank, index)) is not None]
        marks.append([index, min(s.start for s in spans) - zero, max(s.stop for s in spans) - zero])
    return marks


def _predicted(run: RunFollower, ranks: list[int], most: int) -> dict[str, Any]:
    """Return a predicted step for the ranks; one that was played stands for all of its pipeline stage."""
    prediction = run.prediction
    if not isinstance(prediction, Prediction):
        return {"missing": prediction}
    try:
        played = prediction.simulation.timeline
    except ShoalError as error:
        return {"missing": f"Not predicted: {error}"}
    last = played.steps()[-1]
    marks = [mark for rank in played.ranks if (mark := played.step(rank, last)) is not None]
    zero, stop = min(mark.start for mark in marks), max(mark.stop for mark in marks)
    stages = played.ranks
    of_stage, _ = shown_spans(played, stages, zero, stop, max(len(stages), min(most, MOST_POINTS // 4)))
    size = prediction.plan.ranks
    return {
        "length": stop - zero,
        "spans": [_row(span, zero) for span in of_stage],
        "stands_for": {rank: stages[min(len(stages) - 1, rank * len(stages) // size)] for rank in ranks},
    }
