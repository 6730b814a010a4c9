"""The report of `shoal compare --scaling RUN ...`: step, communication and speed over ranks."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from shoal.cli.table import as_json, paragraph, table_of
from shoal.cluster import Cluster
from shoal.compare.scaling import ScalingLaw
from shoal.errors import RunError, UserError
from shoal.run import Run, tokens_per_second
from shoal.simulate import Prediction, measured_timeline, recorded_cluster
from shoal.timeline import explain
from shoal.units import format_seconds

if TYPE_CHECKING:
    from shoal.timeline import Timeline

_FURTHER = (2, 4)
"""Times the most ranks that were measured, for which the law is printed too."""


@dataclass(frozen=True, slots=True)
class _Point:
    """A run: its ranks, speed, seconds of a step, share of communication, and prediction if there is one."""

    run: str
    plan: str
    ranks: int
    tokens_per_second: float
    step: float | None
    communication: float | None
    predicted: float | None


def run_scaling(args: argparse.Namespace) -> int:
    """Print the report.

    Raises:
        RunError: A path is not a run, or does not say its ranks or its speed.
        ClusterError: There is no such Cluster.
        ShoalError: A file of a run is malformed.
    """
    points = sorted((_point(Run.open(path), args.cluster) for path in args.paths), key=lambda at: at.ranks)
    law = ScalingLaw.fit([at.ranks for at in points], [at.tokens_per_second for at in points])
    print(as_json(_summary(points, law)) if args.json else _text(points, law))
    return 0


def _point(run: Run, cluster: str | None) -> _Point:
    described = run.description
    ranks, rate = described.get("world_size"), tokens_per_second(run.metrics(), described.get("since_step"))
    if not ranks or not rate:
        raise RunError(
            f"{run.path} does not say its {'tokens/s' if ranks else 'number of ranks'}",
            possible="a run of `shoal train` that made steps",
            change="leave out this run",
        )
    timeline = measured_timeline(run)
    step = communication = None
    if timeline.steps():
        parts = explain(timeline).parts
        step, communication = parts.wall, (parts.exposed_communication + parts.straggler_wait) / parts.wall
    plan = described.get("plan") or ""
    return _Point(str(run.path), plan, ranks, rate, step, communication, _predicted(run, cluster, timeline))


def _predicted(run: Run, named: str | None, timeline: Timeline) -> float | None:
    """Return the predicted seconds of a step; None without a Cluster, or for a model that is not known."""
    found = Cluster.parse(named) if named is not None else recorded_cluster(run)
    if found is None or not timeline.steps():
        return None
    try:
        return Prediction.of(run, found).seconds_by_kind()["step"]
    except UserError:
        if named is not None:
            raise
        return None


def _summary(points: Sequence[_Point], law: ScalingLaw | None) -> dict[str, Any]:
    rows = [
        asdict(at) | {"efficiency": _efficiency(at, points[0]), "fitted": law and _fitted(law, at.ranks)}
        for at in points
    ]
    told = None
    if law is not None:
        further = {str(ranks): _fitted(law, ranks) for ranks in _further(points)}
        told = asdict(law) | {"further": further}
    return {"points": rows, "law": told}


def _fitted(law: ScalingLaw, ranks: int) -> float:
    return law.tokens_per_second(ranks)


def _further(points: Sequence[_Point]) -> list[int]:
    return [points[-1].ranks * times for times in _FURTHER]


def _efficiency(at: _Point, first: _Point) -> float:
    return at.tokens_per_second / at.ranks / (first.tokens_per_second / first.ranks)


def _text(points: Sequence[_Point], law: ScalingLaw | None) -> str:
    rows = [
        [
            str(at.ranks),
            "-" if at.step is None else format_seconds(at.step),
            "-" if at.predicted is None else format_seconds(at.predicted),
            "-" if at.communication is None else f"{at.communication:.1%}",
            f"{at.tokens_per_second:,.0f}",
            f"{_efficiency(at, points[0]):.1%}",
            *_of_law(law, at.ranks, at.tokens_per_second),
        ]
        for at in points
    ]
    if law is not None:
        rows += [
            [str(ranks), "-", "-", "-", "-", "-", f"{_fitted(law, ranks):,.0f}", "-"]
            for ranks in _further(points)
        ]
    head = ["ranks", "step", "predicted", "communication", "tokens/s", "efficiency", "fitted", "error"]
    plans = "\n".join(f"{at.ranks}: {at.plan}  {at.run}" for at in points)
    return "\n\n".join([table_of(head, rows), plans, paragraph(_conclusion(points, law), indent="")])


def _of_law(law: ScalingLaw | None, ranks: int, measured: float) -> list[str]:
    if law is None:
        return ["-", "-"]
    fitted = law.tokens_per_second(ranks)
    return [f"{fitted:,.0f}", f"{fitted / measured - 1:+.1%}"]


def _conclusion(points: Sequence[_Point], law: ScalingLaw | None) -> str:
    communication = (
        "Communication is what nothing overlaps, with waits for later ranks, as a share of the step. "
    )
    if law is None:
        return communication + "A law needs runs on two numbers of ranks; three tell where more are slower."
    numbers = len({at.ranks for at in points})
    told = (
        f"Fitted: tokens/s = {law.rate:,.0f} N / (1 + {law.contention:.3g} (N - 1) + "
        f"{law.coherence:.3g} N (N - 1)), from {numbers} numbers of ranks. "
    )
    if numbers < 3:
        return communication + told + "A run on a third number of ranks tells where more are slower."
    if numbers == 3:
        told += "Three numbers fix three coefficients: the errors say nothing about further numbers. "
    if math.isinf(law.most):
        return communication + told + "By this law more ranks are always quicker."
    return communication + told + f"By this law the speed is highest at {law.most:,.0f} ranks."
