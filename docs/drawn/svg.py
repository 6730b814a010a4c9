"""Shapes and colours of the pictures; these are of middle brightness, for white pages and dark ones alike."""

from __future__ import annotations

from typing import Literal

__all__ = [
    "BLUE",
    "COLORS",
    "GRAY",
    "GREEN",
    "ORANGE",
    "PURPLE",
    "WIDTH",
    "Anchor",
    "arrow",
    "box",
    "frame",
    "line",
    "svg",
    "text",
]

GRAY, BLUE, ORANGE, GREEN, PURPLE = "#6e7781", "#2f81f7", "#d4681a", "#1a9c6b", "#a45ee5"
COLORS = (BLUE, ORANGE, GREEN, PURPLE)
"""Of ranks 0 to 3, where they are told apart."""

WIDTH = 640

Anchor = Literal["start", "middle", "end"]
_MARKERS = {GRAY: "gray", BLUE: "blue", ORANGE: "orange", GREEN: "green", PURPLE: "purple"}


def text(
    x: float,
    y: float,
    content: str,
    *,
    anchor: Anchor = "middle",
    color: str = GRAY,
    size: float | None = None,
) -> str:
    """A line of text; y is its base line, and the size 13 if not said."""
    sized = "" if size is None else f' font-size="{size:g}"'
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{color}"{sized}>{content}</text>'


def box(
    left: float,
    top: float,
    width: float,
    height: float,
    *,
    color: str = BLUE,
    opacity: float = 1,
    stroke: str | None = GRAY,
    label: str = "",
) -> str:
    """A filled rectangle, with a line around it unless `stroke` is None, and white text in its middle."""
    edge = "" if stroke is None else f' stroke="{stroke}"'
    drawn = (
        f'<rect x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}" '
        f'fill="{color}" fill-opacity="{opacity:.2g}"{edge}/>'
    )
    if not label:
        return drawn
    inside = text(left + width / 2, top + height / 2 + 3.5, label, color="#ffffff", size=10)
    return drawn + "\n" + inside


def frame(
    left: float, top: float, width: float, height: float, *, rounded: float = 0, dashed: bool = False
) -> str:
    """The outline of a rectangle."""
    dashes = ' stroke-dasharray="3 3"' if dashed else ""
    corners = f' rx="{rounded:g}"' if rounded else ""
    return (
        f'<rect x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}"{corners} fill="none" '
        f'stroke="{GRAY}" stroke-opacity="0.5"{dashes}/>'
    )


def line(
    start: tuple[float, float], end: tuple[float, float], *, width: float = 1.5, dashed: bool = False
) -> str:
    """A gray line."""
    (x1, y1), (x2, y2) = start, end
    dashes = ' stroke-dasharray="3 3"' if dashed else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
        f'stroke="{GRAY}" stroke-width="{width:g}"{dashes}/>'
    )


def arrow(
    start: tuple[float, float],
    end: tuple[float, float],
    *,
    stands_out: bool = False,
    color: str | None = None,
) -> str:
    """A message: blue or of a given colour if it stands out, else gray and thin."""
    stroke, width, opacity = (color or BLUE, 1.8, 1) if stands_out else (color or GRAY, 1, 0.7)
    return (
        f'<line x1="{start[0]:g}" y1="{start[1]:g}" x2="{end[0]:g}" y2="{end[1]:g}" stroke="{stroke}" '
        f'stroke-width="{width}" opacity="{opacity}" marker-end="url(#{_MARKERS[stroke]})"/>'
    )


def svg(title: str, height: float, parts: list[str], *, width: float = WIDTH) -> str:
    """The text of a file.

    Args:
        title: What it shows, for who cannot see it.
        height: Of the picture, in the units of its parts.
        parts: What is in it, the lowest first.
        width: As the height.
    """
    used = "\n".join(parts)
    markers = [
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 1 8 4 0 7z" fill="{color}"/></marker>'
        for color, name in _MARKERS.items()
        if f"url(#{name})" in used
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" role="img" font-family="system-ui, sans-serif" font-size="13">',
            f"<title>{title}</title>",
            *([f"<defs>{''.join(markers)}</defs>"] if markers else []),
            *parts,
            "</svg>",
            "",
        ]
    )
