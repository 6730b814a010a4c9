"""The page of a run: loss, speed, parts of the step, ranks, verdict, predicted beside measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.diagnosis.run_follower import RunFollower
from shoal.errors import ShoalError
from shoal.run import speed_of
from shoal.simulate import Prediction
from shoal.timeline import Breakdown, RankBreakdown, Timeline
from shoal.web.ddp import collectives_by_step, lateness
from shoal.web.query import MOST_POINTS, Query, thinned

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
