"""Schedules as SVG: ranks as rows, time to scale. Readable on white pages and on dark ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from shoal.spec.plan.schedules.play import Played
from shoal.spec.plan.schedules.schedule import Action, Schedule, Work

_COLORS = {
    Work.FORWARD: (47, 111, 214),
    Work.BACKWARD: (190, 82, 54),
    Work.INPUT: (222, 134, 42),
    Work.WEIGHT: (38, 140, 98),
}
_WORDS = {
    Work.FORWARD: "F forward",
    Work.BACKWARD: "B backward",
    Work.INPUT: "I gradient of the input",
    Work.WEIGHT: "W gradient of the weights",
}
_PALER = "paler: later stages of the rank"
_IDEAL = "end without any bubble"
_GRAY = "#7d8590"
_LIGHT, _DARK = "#ffffff", "#10151c"

_LEFT = 58  # left edge of the rows, after the names of the ranks
_RIGHT = 16
_ROW = 24
_BOX = 21
_LEGEND = 34
_CAPTION = 26
_AXIS = 30
_LEAST_WIDTH = 720
_MOST_WIDTH = 1500
_SHORTEST = 17  # width of the shortest action, if the picture is then not too wide
_NUMBER = 11  # size of the numbers in boxes and below them
_SMALLEST = 7.5  # smallest size; boxes too small for it have no number
_DIGIT = 0.62  # width of a digit, in sizes
_LETTER = 7.5  # width of a letter of the legend, in a wide font


def _number(value: float) -> str:
    return f"{value:.4g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A schedule to draw.

    Attributes:
        played: The schedule, with the times at which its actions start and stop.
        caption: Line above it, after the schedule's name.
        ideal: Time at which all would end without any bubble.
        end: Time at which the rows end.
        label: Function that writes a time below them.
    """

    played: Played
    caption: str
    ideal: float
    end: float
    label: Callable[[float], str] = _number

    @classmethod
    def of(cls, played: Played) -> Panel:
        """Return the panel of a schedule by itself: all idle time is bubble."""
        ideal = max(map(played.busy, range(played.schedule.ranks)))
        return cls(played=played, caption=caption(played), ideal=ideal, end=played.makespan)


def draw(played: Sequence[Played], title: str = "Pipeline schedules") -> str:
    """Return one picture of several schedules, each by itself, as `draw_panels` does."""
    return draw_panels([Panel.of(each) for each in played], title)


def draw_panels(panels: Sequence[Panel], title: str) -> str:
    """Return one picture of several schedules, one below another, with one scale of time.

    A box is an action with the number of its micro-batch. Its colour is the kind of work, paler for later
    stages of its rank. A dashed line marks when all would end if no rank were ever idle.

    Args:
        panels: Schedules with their times; at least one.
        title: Description of the picture, for readers who cannot see it.
    """
    played = [panel.played for panel in panels]
    longest = max(panel.end for panel in panels) or 1
    scale = _scale(played, longest)
    parts, legend = _legend(played)
    width = max(_LEAST_WIDTH, legend + _RIGHT, _LEFT + longest * scale + _RIGHT)
    top: float = _LEGEND
    for panel in panels:
        parts += _panel(panel, top, scale)
        top += _CAPTION + _ROW * panel.played.schedule.ranks + _AXIS
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {top:.0f}" '
            f'width="{width:.0f}" height="{top:.0f}" role="img" '
            'font-family="system-ui, sans-serif" font-size="13">',
            f"<title>{escape(title, quote=False)}</title>",
            *parts,
            "</svg>",
            "",
        ]
    )


def caption(played: Played) -> str:
    """Return a schedule's size, bubble and peak of activations in a line."""
    schedule = played.schedule
    stages = f", {schedule.virtual} stages each" if schedule.virtual > 1 else ""
    peak = max(played.peaks) / schedule.virtual
    return (
        f"{schedule.ranks} ranks{stages}, {schedule.microbatches} micro-batches: "
        f"bubble {played.bubble:.1%}, peak activations {peak:g} micro-batches"
    )


def _scale(played: Sequence[Played], longest: float) -> float:
    """Return the pixels for a unit of time."""
    shortest = min(
        (
            duration
            for each in played
            for row in each.schedule.table
            for action in row
            if (duration := each.times.of(action)) > 0
        ),
        default=1,
    )
    least, most = ((width - _LEFT - _RIGHT) / longest for width in (_LEAST_WIDTH, _MOST_WIDTH))
    return min(max(_SHORTEST / shortest, least), most)


def _legend(played: Sequence[Played]) -> tuple[list[str], float]:
    """Return the legend, and the x position of its end."""
    parts: list[str] = []
    present = {action.work for each in played for row in each.schedule.table for action in row}
    turns = max(each.schedule.virtual for each in played)
    x: float = _LEFT
    for work in Work:
        if work in present:
            for turn in range(turns):
                parts.append(_rectangle(x, 8, 13, 13, _color(work, turn, turns)))
                x += 13
            parts.append(_text(x + 6, 19, _WORDS[work], anchor="start"))
            x += 20 + _LETTER * len(_WORDS[work])
    if turns > 1:
        parts.append(_text(x, 19, _PALER, anchor="start"))
        x += 14 + _LETTER * len(_PALER)
    parts += [_dashed(x + 4, 5, 24), _text(x + 12, 19, _IDEAL, anchor="start")]
    return parts, x + 12 + _LETTER * len(_IDEAL)


def _panel(panel: Panel, top: float, scale: float) -> Iterator[str]:
    played, schedule = panel.played, panel.played.schedule
    yield (
        f'<text x="{_LEFT}" y="{top + 16:g}" fill="{_GRAY}"><tspan font-weight="bold">'
        f"{escape(schedule.name, quote=False)}</tspan>, {escape(panel.caption, quote=False)}</text>"
    )
    rows = top + _CAPTION
    for rank in range(schedule.ranks):
        y = rows + rank * _ROW
        yield _text(_LEFT - 8, y + 15, f"rank {rank}", anchor="end")
        yield (
            f'<rect x="{_LEFT}" y="{y:g}" width="{panel.end * scale:.2f}" height="{_BOX}" '
            f'fill="{_GRAY}" fill-opacity="0.16"/>'
        )
        turns = {stage: turn for turn, stage in enumerate(schedule.stages_of(rank))}
        for action, start, stop in zip(
            schedule.table[rank], played.starts[rank], played.stops[rank], strict=True
        ):
            color = _color(action.work, turns[action.stage], schedule.virtual)
            x, width = _LEFT + start * scale, (stop - start) * scale
            yield _rectangle(x + 0.5, y, max(width - 1, 0.4), _BOX, color)
            size = min(_NUMBER, (width - 1) / (_DIGIT * len(str(schedule.microbatches - 1))))
            if size >= _SMALLEST:
                yield _text(x + width / 2, y + 15, str(action.microbatch), color=_ink(color), size=size)
    bottom = rows + schedule.ranks * _ROW - (_ROW - _BOX)
    x, end = _LEFT + panel.ideal * scale, _LEFT + panel.end * scale
    yield _dashed(x, rows - 4, bottom + 5)
    yield _text(_LEFT, bottom + 17, "0", size=_NUMBER)
    last = panel.label(panel.end)
    if end - x > _NUMBER * _DIGIT * (len(last) + 2):
        yield _text(x, bottom + 17, panel.label(panel.ideal), anchor="end", size=_NUMBER)
    yield _text(end, bottom + 17, last, anchor="end", size=_NUMBER)


def _color(work: Work, turn: int, turns: int) -> tuple[int, int, int]:
    """Return the kind's colour, mixed with white for the later stages of a rank."""
    share = 0.6 * turn / max(turns - 1, 1)
    red, green, blue = (round(each + (255 - each) * share) for each in _COLORS[work])
    return red, green, blue


def _ink(color: tuple[int, int, int]) -> str:
    red, green, blue = color
    return _DARK if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else _LIGHT


def _dashed(x: float, top: float, bottom: float) -> str:
    return (
        f'<line x1="{x:.2f}" y1="{top:g}" x2="{x:.2f}" y2="{bottom:g}" stroke="{_GRAY}" '
        'stroke-width="1.5" stroke-dasharray="4 3"/>'
    )


def _rectangle(x: float, y: float, width: float, height: float, color: tuple[int, int, int]) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}" '
        f'fill="#{color[0]:02x}{color[1]:02x}{color[2]:02x}"/>'
    )


def _text(
    x: float, y: float, text: str, *, anchor: str = "middle", color: str = _GRAY, size: float = 13
) -> str:
    sized = f' font-size="{size:.3g}"' if size != 13 else ""
    start = f'<text x="{x:.2f}" y="{y:g}" text-anchor="{anchor}" fill="{color}"{sized}>'
    return f"{start}{escape(text, quote=False)}</text>"


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
    scale, cell = _columns_of(played)
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


def _columns_of(played: Played) -> tuple[float, int]:
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
