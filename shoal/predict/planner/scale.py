"""The scaling curve: the best Plan for each number of devices, and the number at which more stop paying.

From n devices to 2 n, tokens/s can at most double. Doubling pays if it brings at least half of that: 1.5
times the tokens/s. The communication wall is the number of devices beyond which a step gets no shorter (with
a fixed batch) or tokens/s do not grow (with a batch that grows).

Amdahl's law: let s be the part of a step on the fewest devices n0 that is not compute. If s did not shrink
at all, and compute and the wait for the slowest rank's compute divided evenly, n devices would take `s + (1 -
s) n0 / n` of that step; with a batch that grows with the devices, all of it. It is no bound, since Plans
differ: time above it is the cost of communication between more devices, time below it is saved by other
degrees.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from shoal.predict.planner.candidate import Candidate
from shoal.predict.planner.choose import refusal
from shoal.predict.planner.offloaded import quicker_outside
from shoal.predict.planner.search import Search
from shoal.spec.cluster import Cluster
from shoal.spec.workload import Workload
from shoal.units import format_count

_PAYS = 1.5  # least factor on tokens/s from twice the devices


@dataclass(frozen=True, slots=True)
class Point:
    """The best Plan for one number of devices.

    Attributes:
        devices: Number of devices.
        batch: Samples of a step.
        best: The best Plan.
        efficiency: Tokens/s of a device, relative to those on the fewest devices.
        amdahl: Seconds of a step, by Amdahl's law.
    """

    devices: int
    batch: int
    best: Candidate
    efficiency: float
    amdahl: float


@dataclass(frozen=True, slots=True)
class Scaling:
    """How steps scale: the best Plan for each number of devices.

    Attributes:
        points: The points, by number of devices, ascending.
        unfit: Numbers of devices for which no legal Plan fits.
        pays_to: Largest number of devices up to which each doubling paid; None if all did.
        wall: Largest number of devices up to which tokens/s grew at all; None if they always did.
    """

    points: tuple[Point, ...]
    unfit: tuple[int, ...]
    pays_to: int | None
    wall: int | None


def scale(
    workload: Workload,
    cluster: Cluster,
    counts: Sequence[int],
    *,
    batch: int | None = None,
    per_device: int | None = None,
    margin: float = 0.1,
) -> Scaling:
    """Choose a Plan for each number of devices.

    Args:
        workload: The training.
        cluster: The kind of machine; its own number of devices is ignored.
        counts: Numbers of devices.
        batch: Samples of a step, for any number of devices.
        per_device: Samples for each device; used instead of `batch`.
        margin: Share of each device's memory that must stay free.

    Raises:
        PlanError: No number of devices has a Plan that fits.
        ClusterError: A number of devices is not a multiple of whole nodes.
    """
    found, unfit = list[Candidate](), list[int]()
    for count in sorted(set(counts)):
        samples = _samples(count, batch, per_device)
        best = _best(Search(workload, cluster.with_devices(count), samples, margin=margin))
        if best is None:
            unfit.append(count)
        else:
            found.append(best)
    if not found:
        most = cluster.with_devices(max(counts))
        raise refusal(Search(workload, most, _samples(max(counts), batch, per_device), margin=margin))
    points = tuple(_point(each, found[0]) for each in found)
    return Scaling(points, tuple(unfit), _last(points, _PAYS), _last(points, 1.0))


def _best(search: Search) -> Candidate | None:
    """Return the best Plan, with `offload` if that is quicker."""
    found = search.best(1).found
    best = found[0] if found else None
    search, best = quicker_outside(search, best) or (search, best)
    return None if best is None else search.candidate(best)


def _samples(count: int, batch: int | None, per_device: int | None) -> int:
    return batch if batch is not None else (per_device or 1) * count


def _point(best: Candidate, first: Candidate) -> Point:
    each, at_first = (one.tokens_per_second / one.devices for one in (best, first))
    serial = 1 - (first.parts["compute"] + first.parts.get("control", 0.0)) / first.seconds
    work = best.batch / first.batch * first.devices / best.devices
    amdahl = first.seconds * (serial + (1 - serial) * work)
    return Point(best.devices, best.batch, best, each / at_first, amdahl)


def _last(points: Sequence[Point], gain: float) -> int | None:
    """Return the devices after which doubling them brings less than `gain` times the tokens/s."""
    for before, after in itertools.pairwise(points):
        doublings = after.devices / before.devices - 1  # 1 for twice as many
        if after.best.tokens_per_second < before.best.tokens_per_second * (1 + (gain - 1) * doublings):
            return before.devices
    return None


_WIDTH, _HEIGHT = 760, 600
_LEFT, _RIGHT = 88, 744
_CURVE = (96, 320)  # top and bottom
_SHARES = (390, 510)
_INK = "#6e7781"
_BETWEEN = 56  # least distance of numbers below the curve
_PARTS = {
    "compute": "#2f81f7",
    "communication": "#d4681a",
    "bubble": "#a45ee5",
    "optimizer": "#1a9c6b",
    "slowest rank": "#b59a1c",
}
"""Colours of middle brightness, for white pages and dark ones."""
_PLANNED, _EVEN, _AMDAHL = "planned", "evenly divided", "Amdahl's law"
_DASHES = {_PLANNED: "", _EVEN: "6 4", _AMDAHL: "2 3"}


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
        *_lines_legend(points[0].devices),
        *_curve(scaling, places),
        *_shares(points, places),
        *_parts_legend(),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def ticks(lowest: float, highest: float) -> list[float]:
    """Return round values for an axis that divides evenly by factors, around all values between the two.

    Over less than a decade they are 1, 2 and 5 times a power of ten; over more than three only the powers.
    """
    decades = math.log10(highest / lowest)
    steps = (1, 2, 5) if decades < 3 else (1,)
    powers = range(math.floor(math.log10(lowest)) - 1, math.ceil(math.log10(highest)) + 2)
    values = [step * 10.0**power for power in powers for step in steps]
    first = max((i for i, value in enumerate(values) if value <= lowest), default=0)
    last = min((i for i, value in enumerate(values) if value >= highest), default=len(values) - 1)
    return values[first : last + 1]


def _place(index: int, count: int) -> float:
    """Return the x position: the middle of the column."""
    return _LEFT + (_RIGHT - _LEFT) * (index + 0.5) / count


def _curve(scaling: Scaling, places: Mapping[int, float]) -> Iterator[str]:
    """Draw tokens/s over devices; both axes divide evenly by factors, if the devices double."""
    lines = _rates(scaling.points)
    rates = [rate for line in lines.values() for rate in line.values()]
    marks = ticks(min(rates), max(rates))
    top, bottom = _CURVE

    def height(rate: float) -> float:
        return bottom - (bottom - top) * math.log(rate / marks[0]) / max(math.log(marks[-1] / marks[0]), 1e-9)

    yield _text(_LEFT - 8, top - 14, "tokens/s", anchor="end")
    for mark in marks:
        yield _line(_LEFT, height(mark), _RIGHT, height(mark), opacity=0.25)
        yield _text(_LEFT - 8, height(mark) + 4, format_count(mark), anchor="end")
    if scaling.pays_to is not None and scaling.pays_to in places:
        x, color = places[scaling.pays_to], _PARTS["communication"]
        yield _line(x, top - 8, x, bottom, color=color)
        words = f"stops paying at {scaling.pays_to}"
        anchor, aside = ("end", 6) if x > (_LEFT + _RIGHT) / 2 else ("start", -6)
        yield _text(x + aside, top - 14, words, anchor=anchor)
    for name, line in lines.items():
        path = " ".join(f"{places[devices]:.1f},{height(rate):.1f}" for devices, rate in line.items())
        yield (
            f'<polyline points="{path}" fill="none" stroke="{_line_color(name)}" stroke-width="2"'
            f"{_dashed(name)}/>"
        )
    yield _text(_LEFT - 8, bottom + 18, "planned", anchor="end")
    last = -math.inf
    for devices, rate in lines[_PLANNED].items():
        x = places[devices]
        yield f'<circle cx="{x:.1f}" cy="{height(rate):.1f}" r="3.5" fill="{_PARTS["compute"]}"/>'
        if x - last >= _BETWEEN:
            yield _text(x, bottom + 18, format_count(rate), anchor="middle")
            last = x


def _rates(points: Sequence[Point]) -> dict[str, dict[int, float]]:
    """Return tokens/s by line and number of devices."""
    first = points[0].best.tokens_per_second / points[0].devices
    return {
        _EVEN: {each.devices: first * each.devices for each in points},
        _AMDAHL: {
            each.devices: each.best.tokens_per_second * each.best.seconds / each.amdahl for each in points
        },
        _PLANNED: {each.devices: each.best.tokens_per_second for each in points},
    }


def _lines_legend(fewest: int) -> Iterator[str]:
    """Name the lines: two of them follow from the Plan of the fewest devices, and are no bounds of others."""
    words = {
        _PLANNED: "planned",
        _EVEN: f"evenly divided from {fewest} devices",
        _AMDAHL: "Amdahl's law from there",
    }
    x: float = _LEFT
    for name, told in words.items():
        yield _line(x, 46, x + 28, 46, color=_line_color(name), width=2, dash=_dashed(name))
        yield _text(x + 34, 50, told)
        x += 60 + 6.6 * len(told)


def _shares(points: Sequence[Point], places: Mapping[int, float]) -> Iterator[str]:
    top, bottom = _SHARES
    width = (_RIGHT - _LEFT) / len(points) * 0.6
    yield _text(_LEFT, top - 16, "where a step's time goes")
    for percent in (0, 50, 100):
        y = bottom - (bottom - top) * percent / 100
        yield _line(_LEFT, y, _RIGHT, y, opacity=0.25)
        yield _text(_LEFT - 8, y + 4, f"{percent} %", anchor="end")
    for point in points:
        parts, above = point.best.parts, float(bottom)
        shares = {
            "compute": parts["compute"] / point.best.seconds,
            "communication": point.best.communication,
            "bubble": point.best.bubble,
            "optimizer": parts["optimizer"] / point.best.seconds,
            "slowest rank": parts.get("control", 0.0) / point.best.seconds,
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


def _parts_legend() -> Iterator[str]:
    for index, (name, color) in enumerate(_PARTS.items()):
        x = _LEFT + 125 * index
        yield f'<rect x="{x}" y="{_HEIGHT - 28}" width="12" height="12" fill="{color}"/>'
        yield _text(x + 18, _HEIGHT - 18, name)


def _line_color(name: str) -> str:
    return _PARTS["compute"] if name == _PLANNED else _INK


def _dashed(name: str) -> str:
    return f' stroke-dasharray="{_DASHES[name]}"' if _DASHES[name] else ""


def _line(
    x1: float,
    y1: float,
    x2: float,
    y2: float,
    *,
    color: str = _INK,
    width: float = 1,
    opacity: float = 1,
    dash: str = "",
) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" '
        f'stroke-width="{width:g}" stroke-opacity="{opacity:g}"{dash}/>'
    )


def _text(x: float, y: float, content: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(content)}</text>'
