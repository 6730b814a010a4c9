"""Looks at where the time of a run went, and prints what would make its step faster: other shares of the
batch for slower ranks, another split into stages, data that is prepared beside the training, and, where
the machines are known, other buckets or another Plan. Each gain is predicted from the run's own
measurements.
The best is applied by: shoal train --resume RUN --advice
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.table import as_json, paragraph
from shoal.errors import RunError, UserError
from shoal.spec.run.directory import resume_command
from shoal.units import format_seconds

if TYPE_CHECKING:
    from shoal.analyze.advise import Advice, Known
    from shoal.spec.run import Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("path", metavar="RUN", type=Path, help="the directory of a run")
    parser.add_argument(
        "--cluster",
        metavar="CLUSTER",
        help="the machines, on which other Plans are played (default: the run's --cluster, if any)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the advice.

    Raises:
        RunError: The path is not a run, or the run has no timeline or no Plan.
        ClusterError: There is no such Cluster.
        ShoalError: A file of the run is malformed.
    """
    from shoal.spec.run import Run

    told = advice_on(Run.open(args.path), args.cluster)
    if args.json:
        print(as_json({"advice": [asdict(each) | {"gain": each.gain} for each in told]}))
    else:
        print(_text(told, args.path))
    return 0


def advice_on(run: Run, cluster: str | None) -> list[Advice]:
    """Return the advice on a run, the largest gain first.

    Args:
        run: The run.
        cluster: The machines; None for those that the run was given, if any.

    Raises:
        RunError: It has no timeline of steps under its Plan, no Plan or no batch.
    """
    from shoal.analyze.advise import advices
    from shoal.predict.simulate import measured_timeline
    from shoal.spec.plan import Plan, SettledPlan

    described = run.description
    batch, text = (described.get("config") or {}).get("batch"), described.get("plan")
    timeline = measured_timeline(run)
    if not (batch and text and timeline.steps()):
        raise RunError(
            f"{run.path} has no {'timeline of steps under its Plan' if batch and text else 'Plan and batch'}",
            possible="a run of `shoal train` that recorded its timeline",
            change="train with record.timeline=true, and ask again after some steps",
        )
    plan = SettledPlan.of(Plan.parse(text), batch)
    data = described["config"].get("data")
    return advices(timeline, plan, batch, _known(run, cluster), data if isinstance(data, dict) else None)


def _known(run: Run, named: str | None) -> Known | None:
    """Return the work and the machines of a run; None if they are not known, and say why."""
    from shoal.analyze.advise import Known
    from shoal.predict.simulate import Prediction, recorded_cluster
    from shoal.spec.cluster import Cluster

    found = Cluster.parse(named) if named is not None else recorded_cluster(run)
    if found is None:
        print("other Plans are not played: the run has no --cluster, and none is given", file=sys.stderr)
        return None
    try:
        prediction = Prediction.of(run, found)
    except UserError as error:
        print(f"other Plans are not played: {error.given}", file=sys.stderr)
        return None
    return Known(prediction.workload, prediction.cluster)


def _text(told: Sequence[Advice], path: Path) -> str:
    from shoal.analyze.advise import LEAST_GAIN

    if not told:
        return f"Nothing was found that is predicted to make the step {LEAST_GAIN:.0%} faster or more."
    return "\n\n".join(
        "\n".join(
            [
                paragraph(each.change),
                f"  step {format_seconds(each.before)} now, {format_seconds(each.after)} predicted: "
                f"{'up to ' if each.is_bound else ''}{each.gain:.1%} less",
                f"  {paragraph(each.reason)}",
                *[f"  {resume_command(path)} --set '{setting}'" for setting in each.settings],
            ]
        )
        for each in told
    )
