"""Chooses the best Plan for each number of devices, and prints step time, efficiency and the share of
exposed communication. Efficiency is tokens/s of a device, relative to the fewest devices. Doubling the
devices pays if it gives at least 1.5 times the tokens/s; at the wall it gives none. Amdahl's law divides
the compute of the fewest devices evenly, and keeps the rest of the step as it is; other Plans may be quicker.

Exit codes: 0 predicted; 2 wrong input, or no number of devices has a Plan that fits.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.outlook import ASIDE, add_outlook, as_asked, aside, band_summary, long_run_of, long_run_summary
from shoal.cli.table import as_json, table_of, write_text
from shoal.cli.workload import add_margin, add_workload, open_workload
from shoal.errors import PlanError
from shoal.units import format_seconds

if TYPE_CHECKING:
    from shoal.predict.cost.outlook import LongRun
    from shoal.predict.planner import Point, Scaling


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_workload(parser)
    add_margin(parser)
    add_outlook(parser)
    batch = parser.add_mutually_exclusive_group(required=True)
    batch.add_argument("--batch", metavar="N", type=int, help="sequences in a step, on any number of devices")
    batch.add_argument(
        "--batch-per-device", metavar="N", type=int, help="sequences in a step for each device"
    )
    parser.add_argument(
        "--devices",
        metavar="N..M",
        default="8..4096",
        help="N, 2N, 4N and so on up to M; or a list N,M,... (default 8..4096)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--svg", metavar="FILE", type=Path, help="also draw the curve")


def run(args: argparse.Namespace) -> int:
    """Print the curve.

    Raises:
        ModelError: There is no such model.
        ClusterError: There is no such cluster, or not with so many devices.
        PlanError: The numbers cannot be read, or none of them has a Plan that fits.
        UserError: The picture cannot be written.
    """
    from shoal.predict.planner import scale
    from shoal.predict.planner.scale import picture
    from shoal.spec.cluster import Cluster

    cluster = as_asked(Cluster.parse(args.cluster), args)
    workload = open_workload(args.model, args.sequence, cluster)
    scaling = scale(
        workload,
        cluster,
        _counts(args.devices),
        batch=args.batch,
        per_device=args.batch_per_device,
        margin=args.margin,
    )
    runs = [
        long_run_of(args, workload, each.best.cluster, each.best.seconds, each.batch)
        for each in scaling.points
    ]
    title = f"{workload.name} on {cluster.name}"
    if args.svg is not None:
        write_text("picture", args.svg, "--svg", picture(scaling, title))
    if args.json:
        print(as_json(_summary(scaling, runs)))
    else:
        print(f"{title}\n\n{_text(scaling, runs)}")
    return 0


def _counts(text: str) -> list[int]:
    """Return the numbers of devices that --devices names."""
    first, dots, last = text.partition("..")
    try:
        counts = [int(first), int(last)] if dots else [int(each) for each in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1 or (dots and counts[0] > counts[1]):
        raise PlanError(
            f"--devices {text} cannot be read",
            possible="two numbers N..M, for N, 2N, 4N and so on up to M; or numbers with commas between them",
            change="give, for instance, --devices 8..4096",
        )
    if not dots:
        return counts
    doubled = [counts[0]]
    while doubled[-1] * 2 <= counts[1]:
        doubled.append(doubled[-1] * 2)
    return doubled


def _summary(scaling: Scaling, runs: Sequence[LongRun | None]) -> dict[str, Any]:
    return {
        "points": [
            _row(point) | ({"long_run": long_run_summary(run, point.best.cluster)} if run is not None else {})
            for point, run in zip(scaling.points, runs, strict=True)
        ],
        "unfit": list(scaling.unfit),
        "pays_to": scaling.pays_to,
        "wall": scaling.wall,
    }


def _row(point: Point) -> dict[str, Any]:
    best = point.best
    return {
        "devices": point.devices,
        "batch": point.batch,
        "plan": str(best.plan),
        "step_seconds": best.seconds,
        **band_summary(best.workload, best.cluster, best.plan, best.seconds),
        "amdahl_seconds": point.amdahl,
        "tokens_per_second": best.tokens_per_second,
        "efficiency": point.efficiency,
        "mfu": best.mfu,
        "communication": best.communication,
        "parts": dict(best.parts),
        "dollars_per_billion_tokens": best.dollars_per_billion_tokens or None,
    }


def _text(scaling: Scaling, runs: Sequence[LongRun | None]) -> str:
    rows = [
        [
            str(point.devices),
            format_seconds(point.best.seconds),
            aside(_row(point), point.best.seconds),
            format_seconds(point.amdahl),
            f"{point.best.tokens_per_second:,.0f}",
            f"{point.efficiency:.1%}",
            f"{point.best.communication:.1%}",
            f"{point.best.bubble:.1%}",
            f"{point.best.mfu:.1%}",
            *_days_and_dollars(run),
        ]
        for point, run in zip(scaling.points, runs, strict=True)
    ]
    head = ["devices", "step", ASIDE, "Amdahl", "tokens/s", "efficiency", "exposed", "bubble", "MFU"]
    head += ["days", "dollars"] if len(rows[0]) > len(head) else []
    most = scaling.points[-1].devices
    told = [
        f"Doubling the devices pays up to {most}, the largest number in this table."
        if scaling.pays_to is None
        else f"Doubling the devices stops paying at {scaling.pays_to}: from there on it gives less than "
        "1.5 times the tokens/s.",
    ]
    if scaling.wall is not None:
        told.append(f"The wall is at {scaling.wall}: more devices do not train more tokens a second.")
    if scaling.unfit:
        told.append("No legal Plan fits in memory on " + ", ".join(map(str, scaling.unfit)) + " devices.")
    plans = "\n".join(f"{each.devices}: {each.best.layout}" for each in scaling.points)
    return "\n\n".join([table_of(head, rows), plans, "\n".join(told)])


def _days_and_dollars(run: LongRun | None) -> list[str]:
    """Return the days and dollars of a long run, if one was asked for."""
    if run is None:
        return []
    if not math.isfinite(run.days):
        return ["never", "-"]
    return [f"{run.days:,.1f}", f"{run.dollars:,.0f}" if run.goodput.price else "-"]
