"""The account of a run in words: goodput, what time was lost by, and what the run costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.cli.table import labelled
from shoal.units import format_seconds

__all__ = ["account_text", "losses"]

_LEAST = 0.0005  # share of the wall clock below which a cause is not named


def account_text(summary: Mapping[str, Any]) -> str:
    """Return an object of `account_summary` in a few lines."""
    starts, failed = summary["launches"], summary["failures"]
    counts = f"{starts} start{'s' if starts != 1 else ''}, {failed} failure{'s' if failed != 1 else ''}"
    rows = [
        ("wall clock", f"{format_seconds(summary['wall_seconds'])}: {counts}"),
        (
            "goodput",
            f"{summary['goodput']:.1%}: {format_seconds(summary['step_seconds'])} of steps that count",
        ),
    ]
    if lost := losses(summary):
        rows.append(
            ("lost", ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in lost.items()))
        )
    rows.append(("cost so far", _cost(summary["device_hours"], summary["dollars"])))
    if summary["steps_left"] and summary["seconds_left"] is not None:
        cost = _cost(summary["device_hours_left"], summary["dollars_left"])
        time = format_seconds(summary["seconds_left"])
        rows.append(("to go", f"{summary['steps_left']} steps in {time}: {cost}"))
    return labelled(rows)


def losses(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds lost by each cause, the largest first, without those that hardly count."""
    lost = sorted(summary["lost_seconds"].items(), key=lambda each: -each[1])
    return {name: seconds for name, seconds in lost if seconds > _LEAST * summary["wall_seconds"]}


def _cost(device_hours: float, dollars: float | None) -> str:
    money = "" if dollars is None else f", ${dollars:,.2f}"
    return f"{device_hours:,.4g} device hours{money}"
