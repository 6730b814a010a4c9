"""Replays the steps of a run without a slow rank, stage, link, wait or kind of work, and prints the seconds
that each costs, the slowdown by uneven work, and the critical path.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal.analyze.replay import WhatIf, what_if
from shoal.cli.table import as_json, labelled, paragraph, table_of, timeline_at
from shoal.errors import RunError

_SMALLEST = 0.001  # share of a step of a change that is worth a row
_ROWS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "path", metavar="RUN", type=Path, help="the directory of a run, a folder of traces, or a table"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print what the steps of a run would take without this and that.

    Raises:
        RunError: The path is not a run, or it has no step that all ranks finished.
        ShoalError: A file of the run is malformed.
    """
    timeline = timeline_at(args.path)
    if not timeline.steps():
        raise RunError(
            f"{args.path} has no timeline of finished steps, so there is nothing to replay",
            possible="a run that recorded its timeline",
            change="train with recording on",
        )
    summary = _summary(what_if(timeline))
    print(as_json(summary) if args.json else _text(summary))
    return 0


def _summary(found: WhatIf) -> dict[str, Any]:
    return {**asdict(found), "slowdown": found.slowdown}


def _text(summary: Mapping[str, Any]) -> str:
    steps, seconds = summary["steps"], summary["seconds"]
    head = labelled(
        [
            ("steps", f"{steps[0]} to {steps[-1]}"),
            ("step", f"{seconds:.6f} s, with what lies between steps, such as validation"),
            ("replayed", f"{summary['replayed']:.6f} s ({summary['replayed'] / seconds - 1:+.2%})"),
            ("slowdown", f"{summary['slowdown']:.3f}, over an ideal step of {summary['ideal']:.6f} s"),
            ("ideal", "each kind of work takes the mean over ranks, each transfer the median of alike ones"),
        ]
    )
    worth = [each for each in summary["savings"] if each["seconds"] >= _SMALLEST * seconds]
    rows = [
        [each["what"], f"{each['seconds']:.6f}", f"{each['seconds'] / seconds:.1%}"] for each in worth[:_ROWS]
    ]
    table = (
        table_of(["what if", "seconds saved a step", "share"], rows)
        if rows
        else "No change would save a thousandth of a step."
    )
    on_path = ", ".join(
        f"{_place(part)} {part['seconds'] / seconds:.1%}"
        for part in summary["path"]
        if part["seconds"] >= 0.01 * seconds
    )
    return f"{head}\n\n{table}\n\n{paragraph(f'critical path: {on_path}')}"


def _place(part: Mapping[str, Any]) -> str:
    if part["rank"] is not None:
        return f"rank {part['rank']} {str(part['what']).replace('_', ' ')}"
    return f"{part['what']} among {', '.join(map(str, part['group']))}"
