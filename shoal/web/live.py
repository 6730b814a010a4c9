"""The page of a run: loss, speed, parts of the step, ranks, verdict, predicted beside measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from statistics import median
from typing import Any

from shoal.analyze.diagnosis.run_follower import RunFollower
from shoal.errors import ShoalError
from shoal.predict.simulate import Prediction
from shoal.spec.run import speed_of
from shoal.spec.timeline import Breakdown, Kind, Lane, Purpose, RankBreakdown, Timeline
from shoal.spec.timeline.breakdown import WORK, blocked_in
from shoal.spec.timeline.intervals import Arrival, StepWindows, intersect, length, match_collectives
from shoal.web.query import MOST_POINTS, Query, thinned

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


_SERIES = ("loss", "validation_loss", "tokens_per_second")
MEASURES = (
    "late",
    "compute",
    "data_wait",
    "file_wait",
    "straggler_wait",
    "exposed_communication",
    "bubble",
    "other",
)
_RECENT_STEPS = 200  # steps whose median speed is the present one
_MOST_CELLS = 1920  # of the heat map: 64 ranks and 30 steps


def live(run: RunFollower, query: Query) -> dict[str, Any]:
    """Return what the page of a run shows.

    The query has "measure": the seconds that the map of ranks shows.

    Raises:
        ConfigError: There is no such measure.
    """
    measure = query.choice("measure", MEASURES[0], MEASURES)
    notices = []
    try:
        run.refresh()
    except ShoalError as error:
        notices.append(str(error))
    timeline, breakdown = run.timeline, run.breakdown
    if run.metrics.unreadable:
        notices.append(f"{run.metrics.unreadable} lines of metrics.jsonl cannot be read and are left out.")
    try:
        compared = _predicted(run)
    except ShoalError as error:
        compared = {"missing": f"Not predicted: {error}"}
    return {
        "run": _described(run),
        "notices": notices,
        "now": _now(run),
        "series": _series(run),
        "parts": None if breakdown is None else _parts(breakdown),
        "heat": None if breakdown is None else _heat(timeline, breakdown, measure),
        "verdict": _verdict(run),
        "account": run.priced_account,
        "predicted": compared,
    }


def _described(run: RunFollower) -> dict[str, Any]:
    description = run.run.description
    model, device = (_mapping(description.get(name)) for name in ("model", "device"))
    config = _mapping(description.get("config"))
    return {
        "name": run.run.path.resolve().name,
        "plan": description.get("plan"),
        "model": model.get("name"),
        "parameters": model.get("parameters"),
        "ranks": description.get("world_size"),
        "device": device.get("name") or device.get("type"),
        "created": description.get("created"),
        "steps": config.get("steps"),
        "batch": config.get("batch"),
        "sequence": config.get("sequence"),
        "age": run.seconds_quiet,
    }


def _now(run: RunFollower) -> dict[str, Any]:
    metrics = run.metrics
    speeds = metrics.column("tokens_per_second")[-_RECENT_STEPS:]
    steps = metrics.steps[-_RECENT_STEPS:]
    recent = [
        {"step": int(step), "tokens_per_second": float(speed)}
        for step, speed in zip(steps, speeds, strict=True)
        if speed == speed  # not NaN
    ]
    speed = speed_of(recent, run.run.description)
    last = {name: metrics.last(name) for name in ("loss", "validation_loss", "step_seconds", "learning_rate")}
    return {
        "step": int(metrics.steps[-1]) if len(metrics) else None,
        **{name: found[1] if found else None for name, found in last.items()},
        "tokens_per_second": speed.total,
        "tokens_per_second_per_device": speed.per_device,
        "mfu": speed.mfu,
    }


def _series(run: RunFollower) -> dict[str, list[list[float]]]:
    steps = run.metrics.steps
    most = MOST_POINTS // len(_SERIES)
    series = {}
    for name in _SERIES:
        values = run.metrics.column(name)
        at = thinned(values, most)
        series[name] = [[int(step), float(value)] for step, value in zip(steps[at], values[at], strict=True)]
    return series


def _parts(breakdown: Breakdown) -> dict[str, Any]:
    parts = breakdown.parts
    return {
        "seconds": parts.disjoint(),
        "wall": parts.wall,
        "communication": parts.communication,
        "overlapped": parts.overlapped_communication,
        "steps": sorted({index for rank in breakdown.ranks for index in rank.counted}),
        "ranks": [{"rank": rank.rank, "seconds": rank.parts.disjoint()} for rank in breakdown.ranks],
    }


def _heat(timeline: Timeline, breakdown: Breakdown, measure: str) -> dict[str, Any]:
    """Return, by rank and step, seconds; None where a rank did not finish the step."""
    indices = sorted({index for rank in breakdown.ranks for index in rank.steps})
    shown = indices[-max(1, _MOST_CELLS // len(breakdown.ranks)) :]
    late = {}
    if measure == "late":
        late = {step: lateness(each) for step, each in collectives_by_step(timeline).items()}

    def value(rank: RankBreakdown, index: int) -> float | None:
        if (parts := rank.steps.get(index)) is None:
            return None
        lateness = late.get(index, {}).get(rank.rank, 0.0)
        seconds = lateness if measure == "late" else getattr(parts, measure) or 0.0
        return round(seconds, 9)

    return {
        "measure": measure,
        "ranks": [rank.rank for rank in breakdown.ranks],
        "steps": shown,
        "values": [[value(rank, index) for index in shown] for rank in breakdown.ranks],
    }


def _verdict(run: RunFollower) -> dict[str, Any] | None:
    found = run.verdict
    if run.breakdown is None:
        return None
    return {
        "bottleneck": found.bottleneck,
        "share": found.share,
        "steps": [found.steps[0], found.steps[-1]] if found.steps else None,
        "sentences": list(found.sentences()),
        "stragglers": [list(each.ranks) for each in found.stragglers],
    }


def _predicted(run: RunFollower) -> dict[str, Any]:
    prediction = run.prediction
    if not isinstance(prediction, Prediction):
        return {"missing": prediction}
    kinds = run.compared
    if kinds is None:
        return {"missing": "No step is finished yet that the prediction could be compared with."}
    return {
        "cluster": prediction.cluster.name,
        "seconds": prediction.simulation.seconds,
        "kinds": kinds,
    }


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
