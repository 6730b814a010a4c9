"""Schedules as text: ranks as rows, time as columns."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.plan.schedules.action import Action
from shoal.plan.schedules.play import Played
from shoal.plan.schedules.schedule import Schedule

_BUSY, _IDLE = "=", "."
_LEAST_SHARE = 0.1
"""Actions that are shorter than this share of the longest have their labels cut off."""


def picture(played: Played, width: int = 120) -> str:
    """Return a schedule to scale in lines of text: `F3==` is a forward of micro-batch 3, dots are idle time.

    Rows longer than `width` continue in further bands below.

    Args:
        played: The schedule to show, with its times.
        width: Columns that a line may have.
    """
    heads = [f"rank {rank}" for rank in range(played.schedule.ranks)]
    margin = max(map(len, heads)) + 2
    scale, cell = _scale(played)
    rows = ["".join(_cells(played, rank, scale)) for rank in range(played.schedule.ranks)]
    length = max(map(len, rows))
    most = max((width - margin + 1) // cell, 1) * cell  # without the blank behind the last action of a row
    bands = -(-length // most)
    band = -(-length // (bands * cell)) * cell if bands else cell
    return "\n\n".join(
        "\n".join(
            f"{head:<{margin}}{row[start : start + band]}".rstrip()
            for head, row in zip(heads, rows, strict=True)
        )
        for start in range(0, length, band)
    )


def label(schedule: Schedule, action: Action) -> str:
    """Return an action's work and micro-batch: `f3` for the second stage of two, `F3.1` for more stages."""
    turn = schedule.stages_of(schedule.placement[action.stage]).index(action.stage)
    text = f"{action.work.value}{action.microbatch}"
    if schedule.virtual <= 2:
        return text.lower() if turn else text
    return f"{text}.{turn}"


def _scale(played: Played) -> tuple[float, int]:
    """Return the columns for a unit of time, and the columns of the shortest action with a whole label."""
    widths = [
        (len(label(played.schedule, action)) + 1, duration)
        for row in played.schedule.table
        for action in row
        if (duration := played.times.of(action)) > 0
    ]
    least = _LEAST_SHARE * max((duration for _, duration in widths), default=0)
    widths = [(width, duration) for width, duration in widths if duration >= least]
    if not widths:
        return 0, 1
    scale = max(width / duration for width, duration in widths)
    return scale, round(min(duration for _, duration in widths) * scale)


def _cells(played: Played, rank: int, scale: float) -> Iterator[str]:
    column = 0
    for action, start, stop in zip(
        played.schedule.table[rank], played.starts[rank], played.stops[rank], strict=True
    ):
        first, last = round(start * scale), round(stop * scale)
        yield _idle(first - column)
        text = label(played.schedule, action)
        yield f"{text.ljust(last - first - 1, _BUSY)} "[: last - first]
        column = last
    yield _idle(round(played.makespan * scale) - column)


def _idle(columns: int) -> str:
    return _IDLE * (columns - 1) + " " * (columns > 0)
