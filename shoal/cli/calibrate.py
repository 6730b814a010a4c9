"""Compares measured runs with predictions for their machines, and writes a corrected description that
predicts them better. The time of the optimizer corrects the memory's rate; forward and backward correct
the device's; collectives correct the links'; waits for later ranks correct the jitter. No rate leaves the
bounds of the data sheet; the error that remains is printed. A difference that the spread of the steps
explains is not corrected, and the reason is printed: run nothing else beside a run that is to calibrate.

Exit codes: 0 corrected; 2 wrong input.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.table import as_json, paragraph, table_of
from shoal.errors import RunError

if TYPE_CHECKING:
    from shoal.predict.cost import Calibration
    from shoal.predict.cost.outlook import Observation
    from shoal.spec.cluster import Cluster
    from shoal.spec.run import Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("paths", metavar="RUN", type=Path, nargs="+", help="the directory of a run")
    parser.add_argument(
        "--cluster",
        metavar="CLUSTER",
        help="the machines of the runs, a preset or a file (default: the first run's --cluster)",
    )
    parser.add_argument(
        "--out", metavar="FILE", type=Path, required=True, help="file for the corrected description"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Correct the description, write it, and print the corrections.

    Raises:
        RunError: A path is not a run, or it has no timeline, no model that is known, or no Cluster.
        ClusterError: The Cluster is not known, has no such number of devices, or cannot be written.
    """
    from shoal.predict.cost import calibrate
    from shoal.spec.run import Run

    runs = [Run.open(path) for path in args.paths]
    cluster = _cluster(runs[0], args.cluster)
    found = calibrate(cluster, [_observation(each, cluster) for each in runs])
    found.cluster.write(args.out)
    print(as_json(_summary(found)) if args.json else _text(found))
    print(f"description written to {args.out}", file=sys.stderr)
    return 0


def _cluster(run: Run, named: str | None) -> Cluster:
    from shoal.predict.simulate import recorded_cluster
    from shoal.spec.cluster import Cluster

    found = Cluster.parse(named) if named is not None else recorded_cluster(run)
    if found is None:
        raise RunError(
            f"{run.path} was trained without --cluster, so there is no description to correct",
            possible="--cluster with a preset or a file of `shoal probe`; runs of `shoal train --cluster`",
            change="give --cluster",
        )
    return found


def _observation(run: Run, cluster: Cluster) -> Observation:
    from shoal.predict.cost.outlook import Observation
    from shoal.predict.simulate import Prediction, measured_timeline

    prediction = Prediction.of(run, cluster)
    timeline = measured_timeline(run)
    if not timeline.steps():
        raise RunError(
            f"{run.path} has no timeline of steps under its Plan, so there is nothing to compare with",
            possible="a run that recorded its timeline",
            change="train with recording on",
        )
    return Observation.of(prediction.workload, prediction.plan, prediction.batch, timeline)


def _summary(found: Calibration) -> dict[str, object]:
    corrections = [asdict(each) | {"left": each.left} for each in found.corrections]
    return {"cluster": asdict(found.cluster), "corrections": corrections}


def _text(found: Calibration) -> str:
    rows = [
        [
            each.name,
            f"{each.measured:.6f}",
            f"{each.before:.6f}",
            f"{each.after:.6f}",
            f"{each.left:+.1%}",
            f"{each.spread:.1%}" if math.isfinite(each.spread) else "-",
            f"{each.corrected:.0%}",
        ]
        for each in found.corrections
    ]
    head = ["seconds of", "measured", "predicted", "now", "left", "steps vary by", "corrected"]
    refused = [
        paragraph(f"{each.name} is {'hardly' if each.corrected else 'not'} corrected: {each.reason}.")
        for each in found.corrections
        if each.reason
    ]
    return "\n\n".join([table_of(head, rows), *(["\n".join(refused)] if refused else [])])
