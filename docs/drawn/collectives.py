"""Draws the algorithms of docs/concepts/collectives.md.

A row shows what every rank has of the buffer, the arrows below it what is sent next.
"""

from __future__ import annotations

from collections.abc import Iterator

from drawn.svg import BLUE, GRAY, WIDTH, arrow, box, frame, line, svg, text
from shoal.predict.cost.collectives.reference_execution import PLAYED, Played, in_order_parents

__all__ = ["pictures"]

MARGIN = 128  # left of the ranks, for the steps' names
HEADER = 26
BOX_HEIGHT = 18
ROW = 62  # from one row of boxes to the next
GAP = 22  # between ranks
BETWEEN_HOSTS = 30  # more than that

DEPTH = 56  # from one generation of a tree to the next
RADIUS = 13


def pictures() -> dict[str, str]:
    """The text of every picture, by the name of its file."""
    drawn = {f"{played.name}.svg": _rows(played) for played in PLAYED}
    return {**drawn, "double-tree.svg": _double_tree(6)}


def _rows(played: Played) -> str:
    states = played.states()
    columns = _columns(played)
    top = HEADER + (HEADER if played.ranks_per_host else 0)
    height = top + ROW * (len(states) - 1) + BOX_HEIGHT + 10
    parts = list(_hosts(played, columns, height))
    for rank, (left, right) in enumerate(columns):
        is_aggregator = played.has_aggregator and rank == played.ranks - 1
        parts.append(text((left + right) / 2, top - 10, "aggregator" if is_aggregator else f"rank {rank}"))
    for row, (step, state) in enumerate(zip(played.steps, states, strict=False)):
        below = top + row * ROW + BOX_HEIGHT
        parts.append(text(0, below + (ROW - BOX_HEIGHT) / 2 + 4, f"{row + 1}  {step.label}", anchor="start"))
        # Those of the first rank that sends stand out, and lie above the others.
        first = min(message.sender for message in step.messages)
        for message in sorted(step.messages, key=lambda each: each.sender == first):
            for index in message.slices:
                assert state[message.sender][index], "a rank sends what it does not have"
                start = _middle(columns[message.sender], played.slices, index), below + 2
                end = _middle(columns[message.receiver], played.slices, index), below + ROW - BOX_HEIGHT - 2
                parts.append(arrow(start, end, stands_out=message.sender == first))
    for row, state in enumerate(states):
        for column, slices in zip(columns, state, strict=True):
            shares = [len(held) / played.whole for held in slices]
            parts += _box(column, top + row * ROW, shares)
    return svg(played.title, height, parts)


def _columns(played: Played) -> list[tuple[float, float]]:
    """The left and the right edge of every rank's box."""
    per_host = played.ranks_per_host or played.ranks
    spare = BETWEEN_HOSTS * (played.ranks // per_host - 1) + (12 if played.ranks_per_host else 2)
    width = (WIDTH - MARGIN - spare - GAP * (played.ranks - 1)) / played.ranks
    lefts = [MARGIN + rank * (width + GAP) + rank // per_host * BETWEEN_HOSTS for rank in range(played.ranks)]
    return [(left, left + width) for left in lefts]


def _hosts(played: Played, columns: list[tuple[float, float]], height: float) -> Iterator[str]:
    """A frame around the ranks of each host."""
    if not played.ranks_per_host:
        return
    for host in range(played.ranks // played.ranks_per_host):
        left = columns[host * played.ranks_per_host][0] - 11
        right = columns[(host + 1) * played.ranks_per_host - 1][1] + 11
        yield frame(left, 1, right - left, height - 2, rounded=8)
        yield text((left + right) / 2, 18, f"host {host}")


def _box(column: tuple[float, float], top: float, shares: list[float]) -> Iterator[str]:
    """A rank's slices: the more of what it is to hold a slice has, the fuller its colour."""
    left, right = column
    width = (right - left) / len(shares)
    for index, share in enumerate(shares):
        opacity = 0 if share == 0 else 1 if share == 1 else 0.08 + 0.62 * share
        yield box(left + index * width, top, width, BOX_HEIGHT, opacity=opacity)


def _middle(column: tuple[float, float], slices: int, index: int) -> float:
    left, right = column
    return left + (right - left) * (index + 0.5) / slices


def _double_tree(ranks: int) -> str:
    """Two trees over the ranks, the second the first with every rank one position further."""
    parents = in_order_parents(ranks)
    depths: dict[int, int] = {0: -1}
    for position in sorted(parents, key=lambda each: -(each & -each)):  # the root first
        depths[position] = depths[parents[position]] + 1
    spacing = WIDTH / 2 / (ranks + 1)
    height = HEADER + DEPTH * max(depths.values()) + 2 * RADIUS + 10
    parts = []
    for half in (0, 1):
        left = half * WIDTH / 2
        parts.append(text(left + WIDTH / 4, 14, f"{('first', 'second')[half]} half of the buffer"))
        at = {
            position: (left + position * spacing, HEADER + RADIUS + DEPTH * depths[position])
            for position in parents
        }
        for position, parent in parents.items():
            if parent:
                parts.append(_branch(at[position], at[parent]))
        for position, (x, y) in at.items():
            is_inner = position in parents.values()
            parts.append(_node(x, y, (position - 1 - half) % ranks, is_inner=is_inner))
    return svg(f"Double binary tree, {ranks} ranks", height, parts)


def _node(x: float, y: float, rank: int, *, is_inner: bool) -> str:
    fill = BLUE if is_inner else "none"
    circle = f'<circle cx="{x:g}" cy="{y:g}" r="{RADIUS}" fill="{fill}" stroke="{BLUE}" stroke-width="1.5"/>'
    return circle + "\n" + text(x, y + 4.5, str(rank), color="#ffffff" if is_inner else GRAY)


def _branch(start: tuple[float, float], end: tuple[float, float]) -> str:
    """Between the edges of two nodes."""
    (x1, y1), (x2, y2) = start, end
    length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
    dx, dy = (x2 - x1) * RADIUS / length, (y2 - y1) * RADIUS / length
    return line((x1 + dx, y1 + dy), (x2 - dx, y2 - dy))
