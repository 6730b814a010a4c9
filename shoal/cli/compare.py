"""Compares two runs value by value: the seconds of a step by kind, each collective, tokens/s and memory.
Steps depend on their neighbours, so blocks of steps are tested, and a difference counts only if it is larger
than what a run drifts by itself. Train each for 500 steps or more, on a machine that does nothing else, or
both at the same time: then their steps are compared in pairs.
With --scaling it takes runs on different numbers of ranks, and fits how their speed grows.

Exit codes: 0 compared; 1 with --check if the second run is slower; 2 wrong input.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.analyze.compare.scaling import ScalingLaw
from shoal.cli.breakdown import words
from shoal.cli.table import as_json, labelled, paragraph, table_of
from shoal.errors import RunError, UserError
from shoal.predict.simulate import Prediction, measured_timeline, recorded_cluster
from shoal.spec.cluster import Cluster
from shoal.spec.run import Run, tokens_per_second
from shoal.spec.timeline import explain
from shoal.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from shoal.analyze.compare import Difference, RunValues
    from shoal.spec.timeline import Timeline


_UNITS: Mapping[str, Callable[[float], str]] = {
    "s": lambda value: f"{value:.6f} s",
    "tokens/s": lambda value: f"{value:,.0f}",
    "bytes": lambda value: format_bytes(round(value)),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("paths", metavar="RUN", type=Path, nargs="+", help="the directory of a run")
    parser.add_argument("--scaling", action="store_true", help="fit the speed of runs over their ranks")
    parser.add_argument(
        "--cluster",
        metavar="CLUSTER",
        help="with --scaling: predict each run on these machines (default: the run's --cluster, if any)",
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 if the second run's step is slower")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the comparison.

    Raises:
        RunError: A path is not a run; there are not two; or a run has no values.
        ShoalError: A file of a run is malformed.
    """
    if args.scaling:
        from shoal.cli.compare import run_scaling

        return run_scaling(args)
    from shoal.analyze.compare import RunValues, Verdict, differences
    from shoal.spec.run import Run

    if len(args.paths) != 2:
        raise RunError(
            f"{len(args.paths)} run{'s were' if len(args.paths) > 1 else ' was'} given",
            possible="two runs, or with --scaling runs on different numbers of ranks",
            change="give two runs, or --scaling",
        )
    before, after = (RunValues.of(Run.open(path)) for path in args.paths)
    rows = differences(before, after)
    if not rows:
        raise RunError(
            f"{before.path} and {after.path} have no values in common",
            possible="runs with steps, in metrics.jsonl or in the timeline",
            change="give two runs that made steps",
        )
    print(as_json(_summary(before, after, rows)) if args.json else _text(before, after, rows))
    slower = {("step", Verdict.HIGHER), ("mean step", Verdict.HIGHER), ("tokens/s", Verdict.LOWER)}
    return int(args.check and any((row.name, row.verdict) in slower for row in rows))


def _summary(before: RunValues, after: RunValues, rows: Sequence[Difference]) -> dict[str, Any]:
    runs = [
        {"run": each.path, "plan": each.plan, "ranks": each.ranks, "steps": _steps(each)}
        for each in (before, after)
    ]
    return {"runs": runs, "differences": [asdict(row) | {"change": row.change} for row in rows]}


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count != 1 else ''}"


def _steps(values: RunValues) -> int:
    return max(len(values.tokens_per_second), len(values.kinds.get("step", ())))


def _text(before: RunValues, after: RunValues, rows: Sequence[Difference]) -> str:
    heading = [
        (name, f"{each.path}: {each.plan or 'no Plan'}, {_ranks(each.ranks)}, {_steps(each)} steps compared")
        for name, each in (("before", before), ("after", after))
    ]
    head = ["", "before", "after", "change", "95 % interval", "drift", "verdict"]
    groups = (("kinds", "run"), ("collectives",))
    tables = [
        table_of([title, *head[1:]], [_cells(row) for row in rows if row.group in group])
        for title, group in zip(("value", "collective"), groups, strict=True)
        if any(row.group in group for row in rows)
    ]
    return "\n\n".join([labelled(heading), *tables, _conclusion(rows)])


def _cells(row: Difference) -> list[str]:
    interval = drift = "-"
    if row.test is not None and row.before:
        low, high = (f"{end / row.before:+.1%}" for end in (row.test.low, row.test.high))
        interval, drift = f"{low} to {high}", f"{row.test.drift / row.before:.1%}"
    change = "-" if row.change is None else f"{row.change:+.1%}"
    in_unit = _UNITS[row.unit]
    return [words(row.name), in_unit(row.before), in_unit(row.after), change, interval, drift, row.verdict]


def _conclusion(rows: Sequence[Difference]) -> str:
    """Return what the comparison shows, in sentences."""
    from shoal.analyze.compare import DRIFT, FEWEST, LEVEL, Verdict

    shown = [row for row in rows if row.verdict in (Verdict.HIGHER, Verdict.LOWER)]
    told = []
    if shown:
        told = [f"{words(row.name)} {row.change or 0:+.1%}" for row in shown]
        told = ["Different: " + ", ".join(told) + "."]
    elif any(row.test is not None for row in rows):
        told = ["No difference is shown."]
    if any(row.verdict == Verdict.DRIFT for row in rows):
        told.append(
            f"Where the verdict is '{Verdict.DRIFT}', the change is less than {DRIFT:g} times what a run "
            "drifts by itself: train both again, for longer, at the same time, or on a quieter machine."
        )
    if any(row.verdict == Verdict.FEW for row in rows):
        told.append(f"A test needs {FEWEST} steps after warm-up in each run.")
    claim = f"A difference that does not exist is claimed with a probability of {LEVEL:.1%}"
    if any(row.test is not None and row.test.is_paired for row in rows):
        told.append(f"The runs trained side by side, so their steps were compared in pairs. {claim}.")
    else:
        told.append(f"{claim}, as far as the machine did not change between the runs.")
    return paragraph(" ".join(told), indent="")


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
    print(as_json(_scaling_summary(points, law)) if args.json else _scaling_text(points, law))
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


def _scaling_summary(points: Sequence[_Point], law: ScalingLaw | None) -> dict[str, Any]:
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


def _scaling_text(points: Sequence[_Point], law: ScalingLaw | None) -> str:
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
    return "\n\n".join([table_of(head, rows), plans, paragraph(_scaling_conclusion(points, law), indent="")])


def _of_law(law: ScalingLaw | None, ranks: int, measured: float) -> list[str]:
    if law is None:
        return ["-", "-"]
    fitted = law.tokens_per_second(ranks)
    return [f"{fitted:,.0f}", f"{fitted / measured - 1:+.1%}"]


def _scaling_conclusion(points: Sequence[_Point], law: ScalingLaw | None) -> str:
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
