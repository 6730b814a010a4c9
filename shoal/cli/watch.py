"""Shows a run while it trains: loss, speed, time left, where the time of a step goes, and each rank. It reads
the files of the run, so that it may be started and stopped at any time, on any host that has them.
On a terminal it draws (extra `watch`); elsewhere it prints a line for each look. It ends when the run ends.

Exit codes: 0 the run made its last step, or --once; 1 the run ended before that; 2 wrong input; 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.breakdown import words
from shoal.errors import ShoalError, UserError

if TYPE_CHECKING:
    from shoal.diagnosis.run_follower import RunFollower

_LOOK_TERMINAL, _LOOK_PLAIN = 0.5, 10.0
_REST = 4.0
"""Times of a look for which the command rests after it."""
_STEPS, _SPANS = 50, 200_000
"""Newest steps that a verdict is on, and most spans of them."""
_REST_OF_VERDICT = 100.0
"""Times of a verdict for which the next one waits: verdicts take 1 % of a core."""
_NICENESS = 10
"""Added to that of the command: ranks of this host go first."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("path", metavar="RUN", type=Path, help="the directory of a run")
    parser.add_argument(
        "--every",
        metavar="SECONDS",
        type=float,
        help=f"time between looks (default {_LOOK_TERMINAL:g} on a terminal, else {_LOOK_PLAIN:g})",
    )
    parser.add_argument("--once", action="store_true", help="look once, and end")
    parser.add_argument("--plain", action="store_true", help="print lines on a terminal too")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each look")


def run(args: argparse.Namespace) -> int:
    """Show the run until it ends.

    Raises:
        RunError: The path is not a run.
        MissingExtraError: rich is not installed, and there is a terminal.
        UserError: The time between looks is not a positive number.
    """
    from shoal.diagnosis.run_follower import RunFollower
    from shoal.run import Run

    draws = sys.stdout.isatty() and not (args.plain or args.json)
    every = args.every if args.every is not None else _LOOK_TERMINAL if draws else _LOOK_PLAIN
    if not (every > 0 and math.isfinite(every)):
        raise UserError(
            f"--every {args.every:g} was given", possible="seconds above 0", change="give --every 1"
        )
    if not args.once:
        os.nice(_NICENESS)
    run = RunFollower(Run.open(args.path), steps=_STEPS, spans=_SPANS, rest=_REST_OF_VERDICT)
    if draws:
        from shoal.cli.watch_drawn import Drawing

        with Drawing() as drawing:
            return _follow(run, every, args.once, drawing.show)
    return _follow(run, every, args.once, _print_json if args.json else _print_line)


def _follow(run: RunFollower, every: float, once: bool, show: Any) -> int:
    step_before: object = None
    while True:
        begin = time.monotonic()
        with contextlib.suppress(ShoalError):  # `unread` counts what cannot be read
            run.refresh()
        has_ended = run.has_ended
        step = run.values.get("step")
        if once or has_ended or step != step_before or show not in (_print_line, _print_json):
            show(run)
        step_before = step
        if once or has_ended:
            return 0 if once or run.is_done else 1
        # A run of many ranks takes long to look at: most of the core is left to others.
        time.sleep(max(every, _REST * (time.monotonic() - begin)))


def _print_line(run: RunFollower) -> None:
    print(line_of(run), flush=True)


def line_of(run: RunFollower) -> str:
    """Return the state of a run in a line."""
    from shoal.units import format_seconds

    values = run.values
    told = [f"step {values.get('step', 0):.0f}" + (f"/{run.steps}" if run.steps is not None else "")]
    for name, form in (("loss", ".3f"), ("validation_loss", ".3f"), ("tokens_per_second", ",.0f")):
        if name in values:
            label = "tokens/s" if name == "tokens_per_second" else words(name)
            told.append(f"{label} {values[name]:{form}}")
    if run.seconds_left:
        told.append(f"{format_seconds(run.seconds_left)} left")
    if run.account is not None:
        told.append(f"goodput {run.account.goodput:.1%}")
    shares = [f"{words(name)} {share:.0%}" for name, share in run.shares.items() if share >= 0.005]
    if run.verdict.bottleneck is not None:
        told.append(f"bound by {run.verdict.bottleneck}")
    return "  ".join([*told, *([", ".join(shares)] if shares else []), run.state])


def _print_json(run: RunFollower) -> None:
    from shoal.cli.breakdown import verdict_summary
    from shoal.cost.outlook import account_summary
    from shoal.run import json_number

    ranks = run.breakdown.ranks if run.breakdown is not None else ()
    told: Mapping[str, Any] = {
        "state": run.state,
        "steps": run.steps,
        "values": {name: json_number(value) for name, value in run.values.items()},
        "seconds_left": run.seconds_left,
        "seconds_quiet": run.seconds_quiet,
        "account": account_summary(run.account, run.description),
        "parts": run.breakdown.parts.disjoint() if run.breakdown is not None else None,
        "ranks": {str(each.rank): each.parts.disjoint() for each in ranks},
        "verdict": verdict_summary(run.verdict),
        "unread_lines": run.unread,
    }
    print(json.dumps(told), flush=True)
