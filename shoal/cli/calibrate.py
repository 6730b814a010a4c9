"""`shoal calibrate RUN`: corrects a description of machines by what a run measured on them."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.table import table_of
from shoal.errors import RunError

if TYPE_CHECKING:
    from shoal.cost.calibrate import Calibration

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Compares what a run measured with what the description of its machines predicts, and writes a description
whose predictions are nearer: the optimizer corrects the memory's rate, forward and backward those of the
device, collectives those of the links. What no rate within the data sheet's bounds explains is left.

Exit codes: 0; 2 something given cannot work.
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Adds the command to the program's."""
    parser = commands.add_parser(
        "calibrate",
        help="correct a description of machines by what a run measured",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", metavar="RUN", type=Path, help="the directory of a run")
    parser.add_argument(
        "--cluster",
        metavar="CLUSTER",
        required=True,
        help="that it ran on: a preset, or a file",
    )
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="of the corrected one")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Corrects, writes and tells.

    Raises:
        RunError: The path is not a run, or it has no timeline or no model that is known.
        ClusterError: The Cluster is not known, or cannot be written.
    """
    from shoal.cli.prediction import Prediction
    from shoal.cost.calibrate import calibrate
    from shoal.run import Run
    from shoal.simulate import measured_timeline

    opened = Run.open(args.path)
    prediction = Prediction.of(opened, args.cluster)
    timeline = measured_timeline(opened)
    if not timeline.steps():
        raise RunError(
            f"{opened.path} has no timeline of steps under its Plan, so there is nothing to correct by",
            possible="a run that recorded its timeline",
            change="train with recording on",
        )
    found = calibrate(prediction.cluster, prediction.workload, prediction.plan, prediction.batch, timeline)
    found.cluster.write(args.out)
    print(json.dumps(_summary(found), indent=2) if args.json else _text(found))
    print(f"description written to {args.out}", file=sys.stderr)
    return 0


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
        ]
        for each in found.corrections
    ]
    return table_of(["seconds of", "measured", "predicted", "now", "left"], rows)
