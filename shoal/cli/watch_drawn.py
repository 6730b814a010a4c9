"""The drawing of `shoal watch` on a terminal, with rich: progress, curves, parts of a step, ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Self, final

from shoal.cli.breakdown import words
from shoal.errors import MissingExtraError
from shoal.timeline import Breakdown
from shoal.units import format_count, format_seconds

try:
    from rich.console import Console, Group, RenderableType
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text
except ImportError as error:
    raise MissingExtraError("drawing a run on the terminal", package="rich", extra="watch") from error

if TYPE_CHECKING:
    from shoal.diagnosis.run_follower import RunFollower

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
