"""The scaling curve as a picture: tokens/s over devices, and the parts of a step's time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from shoal.planner.scale import Point, Scaling
from shoal.units import format_count

__all__ = ["picture"]

_WIDTH, _HEIGHT = 720, 560
_LEFT, _RIGHT = 80, 700
_CURVE = (60, 300)  # top and bottom
_SHARES = (360, 480)
_INK = "#6e7781"
_PARTS = {
    "compute": "#2f81f7",
    "communication": "#d4681a",
    "bubble": "#a45ee5",
    "optimizer": "#1a9c6b",
    "slowest rank": "#b59a1c",
}
"""Colours of middle brightness, for white pages and dark ones."""


def picture(scaling: Scaling, title: str) -> str:
    """Return a curve as SVG.

    Args:
        scaling: Scaling with at least one point.
        title: Title above the picture.
    """
    points = scaling.points
    places = {point.devices: _place(index, len(points)) for index, point in enumerate(points)}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'font-family="sans-serif" font-size="12" fill="{_INK}">',
        f"<title>{escape(title)}</title>",
        _text(_LEFT, 24, title, size=15),
        *_curve(scaling, places),
        *_shares(points, places),
        *_legend(),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _place(index: int, count: int) -> float:
    """Return the x position: the middle of the column."""
    return _LEFT + (_RIGHT - _LEFT) * (index + 0.5) / count


def _curve(scaling: Scaling, places: dict[int, float]) -> Iterator[str]:
    points = scaling.points
    first = points[0].best.tokens_per_second
    ideal = {each.devices: first * each.devices / points[0].devices for each in points}
    rates = {each.devices: each.best.tokens_per_second for each in points}
    bounds = {each.devices: each.best.tokens_per_second * each.best.seconds / each.amdahl for each in points}
    lowest = min([*rates.values(), *bounds.values()])
    highest = max([*ideal.values(), *rates.values(), *bounds.values()])

    def height(rate: float) -> float:
        top, bottom = _CURVE
        return bottom - (bottom - top) * math.log(rate / lowest) / max(math.log(highest / lowest), 1e-9)

    yield _text(_LEFT, 46, "tokens/s: planned, evenly divided (dashed), by Amdahl's bound (dotted)")
    for values, dash in ((ideal, "6 4"), (bounds, "2 3"), (rates, "")):
        path = " ".join(f"{places[devices]:.1f},{height(rate):.1f}" for devices, rate in values.items())
        color = _INK if dash else _PARTS["compute"]
        style = f' stroke-dasharray="{dash}"' if dash else ""
        yield f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{style}/>'
    for devices, rate in rates.items():
        x, y = places[devices], height(rate)
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{_PARTS["compute"]}"/>'
        yield _text(x + 6, y + 15, format_count(rate))
    if scaling.pays_to in places:
        x = places[scaling.pays_to]
        top, bottom = _CURVE
        color = _PARTS["communication"]
        yield f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" stroke="{color}"/>'
        yield _text(x + 6, _CURVE[1] - 6, f"stops paying at {scaling.pays_to}")


def _shares(points: Sequence[Point], places: dict[int, float]) -> Iterator[str]:
    top, bottom = _SHARES
    width = (_RIGHT - _LEFT) / len(points) * 0.6
    yield _text(_LEFT, top - 14, "where a step's time goes")
    for point in points:
        cost, above = point.best.cost, float(bottom)
        shares = {
            "compute": cost.compute / cost.seconds,
            "communication": point.best.communication,
            "bubble": cost.parts["bubble"] / cost.seconds,
            "optimizer": cost.parts["optimizer"] / cost.seconds,
            "slowest rank": cost.parts["straggler"] / cost.seconds,
        }
        for name, share in shares.items():
            tall = share * (bottom - top)
            above -= tall
            yield (
                f'<rect x="{places[point.devices] - width / 2:.1f}" y="{above:.1f}" width="{width:.1f}" '
                f'height="{tall:.1f}" fill="{_PARTS[name]}"><title>{name} {share:.1%}</title></rect>'
            )
        yield _text(places[point.devices], bottom + 18, str(point.devices), anchor="middle")
    yield _text((_LEFT + _RIGHT) / 2, bottom + 38, "devices", anchor="middle")


def _legend() -> Iterator[str]:
    for index, (name, color) in enumerate(_PARTS.items()):
        x = _LEFT + 125 * index
        yield f'<rect x="{x}" y="{_HEIGHT - 28}" width="12" height="12" fill="{color}"/>'
        yield _text(x + 18, _HEIGHT - 18, name)


def _text(x: float, y: float, content: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(content)}</text>'
