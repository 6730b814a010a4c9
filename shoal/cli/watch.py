"""Shows a run while it trains: loss, speed, time left, where the time of a step goes, and each rank. It reads
the files of the run, so that it may be started and stopped at any time, on any host that has them.
On a terminal it draws (extra `watch`); elsewhere it prints a line for each look. It ends when the run ends.

Exit codes: 0 the run made its last step, or --once; 1 the run ended before that; 2 wrong input; 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, final

from shoal.cli.breakdown import words
from shoal.errors import MissingExtraError, ShoalError, UserError
from shoal.spec.timeline import Breakdown
from shoal.units import format_count, format_seconds

if TYPE_CHECKING:
    from shoal.analyze.diagnosis.run_follower import RunFollower


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
    from shoal.analyze.diagnosis.run_follower import RunFollower
    from shoal.spec.run import Run

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
        from shoal.cli.watch import Drawing

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
    from shoal.predict.cost.outlook import account_summary
    from shoal.spec.run import json_number

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


try:
    from rich.console import Console, Group, RenderableType
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text
except ImportError as error:
    raise MissingExtraError("drawing a run on the terminal", package="rich", extra="watch") from error

if TYPE_CHECKING:
    from shoal.analyze.diagnosis.run_follower import RunFollower

_LOOKS: Mapping[str, tuple[str, str]] = {
    "compute": ("█", "blue"),
    "launch": ("▚", "magenta"),
    "exposed_communication": ("▓", "yellow"),
    "bubble": ("░", "white"),
    "data_wait": ("▒", "cyan"),
    "file_wait": ("▖", "green"),
    "straggler_wait": ("▞", "bright_red"),
    "other": ("·", "bright_black"),
}
"""Each part has a character of its own as well as a colour: a bar reads without colours too."""
_LEVELS = "▁▂▃▄▅▆▇█"
_MOST_RANKS = 16
_MOST_SENTENCES = 5
_MOST_LOSSES = 4
_LABEL = 10  # columns


@final
class Drawing:
    """Draw a run in place until the context is left; the last picture stays."""

    def __init__(self) -> None:
        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def show(self, run: RunFollower) -> None:
        """Draw the state of the run."""
        self._live.update(drawn(run, self._console.width), refresh=True)


def drawn(run: RunFollower, width: int) -> Group:
    """Return the picture of a run for a terminal of a width."""
    parts: list[RenderableType] = [
        _heading(run),
        _progress(run, width),
        *_curves(run, width),
        *_goodput(run),
    ]
    if run.breakdown is not None:
        parts += [Text(), _legend(run), *_ranks(run.breakdown, width)]
        parts += [Text(), *map(Text, run.verdict.sentences()[:_MOST_SENTENCES])]
    if run.unread:
        parts.append(Text(f"{run.unread} lines of the run could not be read", style="yellow"))
    return Group(*parts)


def _heading(run: RunFollower) -> Text:
    described = run.description
    model = described.get("model") or {}
    told = [str(described.get("name") or "run"), str(model.get("name") or "")]
    if model.get("parameters"):
        told.append(f"{format_count(model['parameters'])} parameters")
    told += [str(described.get("plan") or ""), f"{described.get('world_size') or '?'} ranks"]
    words = "  ".join(each for each in told if each)
    # Neither markup nor escape sequences in the words of a run may change the picture.
    safe = "".join(sign if sign.isprintable() else "?" for sign in words)
    return Text(f"{safe}  ", style="bold").append(run.state, style="default")


def _progress(run: RunFollower, width: int) -> Text:
    step, steps = int(run.values.get("step", 0)), run.steps
    line = Text("step".ljust(_LABEL))
    if not steps:
        return line.append(str(step))
    told = f" {step}/{steps}  {step / steps:.0%}"
    told += f"  {format_seconds(run.seconds_left)} left" if run.seconds_left else ""
    columns = max(10, width - _LABEL - len(told) - 1)
    done = min(columns, columns * step // steps)
    return line.append("━" * done, style="green").append("╌" * (columns - done), style="dim").append(told)


def _curves(run: RunFollower, width: int) -> list[Text]:
    values = run.values
    curves = (
        ("loss", run.metrics.curve("loss"), f" {values['loss']:.3f}" if "loss" in values else ""),
        (
            "tokens/s",
            run.metrics.curve("tokens_per_second"),
            f" {values['tokens_per_second']:,.0f}" if "tokens_per_second" in values else "",
        ),
    )
    lines = []
    for label, points, told in curves:
        if points:
            line = Text(label.ljust(_LABEL))
            line.append(sparkline(points, max(10, width - _LABEL - 14)), style="blue")
            lines.append(line.append(told, style="bold"))
    if "validation_loss" in values:
        lines.append(Text("validation".ljust(_LABEL)).append(f" {values['validation_loss']:.3f}"))
    return lines


def _goodput(run: RunFollower) -> list[Text]:
    account = run.account
    if account is None or not account.wall:
        return []
    lost = sorted(account.lost.items(), key=lambda each: -each[1])[:_MOST_LOSSES]
    told = "  ".join(f"{name} {seconds / account.wall:.1%}" for name, seconds in lost if seconds)
    line = Text("goodput".ljust(_LABEL)).append(f"{account.goodput:.1%}", style="bold")
    return [line.append(f" of {format_seconds(account.wall)}, lost: {told}")]


def sparkline(points: Sequence[float], columns: int) -> str:
    """Return a curve in a line; a column is the mean of its points, "!" where one of them is not finite."""
    count = min(columns, len(points))
    bounds = [len(points) * column // count for column in range(count + 1)]
    cut = [points[start:stop] for start, stop in itertools.pairwise(bounds)]
    means = [sum(each) / len(each) for each in cut]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_LEVELS) - 1) / (high - low) if high > low else 0.0
    return "".join(_LEVELS[round((mean - low) * scale)] if math.isfinite(mean) else "!" for mean in means)


def _legend(run: RunFollower) -> Text:
    told = run.breakdown.parts.wall if run.breakdown is not None else 0.0
    line = Text("of a step".ljust(_LABEL)).append(f"{format_seconds(told)}: ")
    for name, share in run.shares.items():
        if share >= 0.005:
            sign, colour = _LOOKS[name]
            line.append(f"{sign * 2} ", style=colour).append(f"{words(name)} {share:.0%}  ")
    return line


def _ranks(breakdown: Breakdown, width: int) -> list[Table | Text]:
    """Return a bar for each rank; of many, for those that wait least for others, whom the others wait for."""
    ranks = sorted(breakdown.ranks, key=lambda each: each.parts.straggler_wait)[:_MOST_RANKS]
    longest = max(each.parts.wall for each in ranks)
    columns = max(10, width - _LABEL - 12)
    table = Table.grid(padding=(0, 1))
    for each in sorted(ranks, key=lambda each: each.rank):
        bar = Text()
        for name, seconds in each.parts.disjoint().items():
            sign, colour = _LOOKS[name]
            bar.append(sign * round(columns * seconds / longest), style=colour)
        table.add_row(f"rank {each.rank}".ljust(_LABEL - 1), bar, format_seconds(each.parts.wall))
    left_out = len(breakdown.ranks) - len(ranks)
    if not left_out:
        return [table]
    return [table, Text(f"{left_out} more ranks, which wait longer for these", style="dim")]
