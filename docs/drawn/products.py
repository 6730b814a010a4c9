"""Draws tensor parallelism: what is split, and what is sent, as the code does it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from drawn.svg import BLUE, COLORS, GRAY, ORANGE, arrow, box, frame, line, svg, text
from drawn.watched import Event, watch
from shoal.models import Transformer, preset
from shoal.parallel.tensor.parallel_linear import column_products, row_product
from shoal.parallel.tensor.tensor import TensorCuts, cut_tensors, layout_of
from shoal.spec.plan import Plan

__all__ = ["Pass", "communications", "pictures", "timed", "watch_products"]

RANKS = 2  # of the pictures of one layer
RING = 4  # of the time chart

SEQ, HIDDEN, FEATURES = 56, 40, 64  # heights and widths that stand for them


def pictures() -> dict[str, str]:
    """The text of every picture, by the name of its file."""
    return {
        "tensor-parallel.svg": _layers("plain"),
        "sequence-parallel.svg": _layers("sequence"),
        "async-tensor-parallel.svg": _chart(),
    }


class Pass(NamedTuple):
    """The collectives of a column layer, and of a row layer, in one direction."""

    column: tuple[str, ...]
    row: tuple[str, ...]


def watch_products(tensor: str, ranks: int) -> list[list[Event]]:
    """What each rank does in a column layer and the row layer after it, forward and backward.

    Args:
        tensor: As a Plan names it.
        ranks: Number of ranks, each of which has four positions of the sequence. What lies at the positions
            of part i, of the input as of what is between the layers, is i + 1.
    """
    sequence, overlap = tensor != "plain", tensor == "async"

    def program(axis: Any) -> None:
        parts = torch.arange(1.0, ranks + 1).repeat_interleave(4).view(1, -1, 1)
        held = parts[:, 4 * axis.index : 4 * axis.index + 4] if sequence else parts
        hidden = held.expand(-1, -1, 8).clone().requires_grad_()
        between = parts.expand(-1, -1, 2).clone().requires_grad_()
        into, out = torch.ones(2, 8, requires_grad=True), torch.ones(8, 2, requires_grad=True)
        axis.note("column forward")
        (made,) = column_products(hidden, [into], axis, sequence=sequence, overlap=overlap)
        axis.note("row forward")
        result = row_product(between, out, axis, sequence=sequence, overlap=overlap)
        axis.note("row backward")
        result.backward(torch.ones_like(result))
        axis.note("column backward")
        made.backward(torch.ones_like(made))

    return watch(program, ranks)


def section(events: Sequence[Event], name: str) -> list[Event]:
    """What a rank did from one note to the next."""
    kinds = [event.kind for event in events]
    first = kinds.index(name) + 1
    notes = [index for index, kind in enumerate(kinds) if " " in kind and index >= first]
    return list(events[first : notes[0] if notes else None])


def communications(tensor: str) -> tuple[Pass, Pass]:
    """The collectives of rank 0, forward and backward, each in the order in which it starts."""
    events = watch_products(tensor, RANKS)[0]

    def started(name: str) -> tuple[str, ...]:
        return tuple(event.name for event in section(events, name) if event.kind == "start")

    forward, backward = (
        Pass(started(f"column {direction}"), started(f"row {direction}"))
        for direction in ("forward", "backward")
    )
    return forward, backward


def _cuts() -> list[TensorCuts]:
    """What the ranks have of a small transformer."""
    model = Transformer(preset("tiny"))
    plan = Plan.parse(f"tp={RANKS}")
    return [cut_tensors(model, layout_of(model), plan, index) for index in range(RANKS)]


TOP = 80  # of the first rank's shapes
LANE = 86  # from one rank to the next
AT = {
    "before": 66,
    "to": 136,
    "input": 166,
    "columns": 230,
    "between": 318,
    "rows": 406,
    "sums": 470,
    "from": 540,
    "after": 574,
}
"""The left edge of every shape; of the communications, the middle."""

SIZES = {
    "before": (HIDDEN, SEQ),
    "input": (HIDDEN, SEQ),
    "columns": (FEATURES, HIDDEN),
    "between": (FEATURES, SEQ),
    "rows": (HIDDEN, FEATURES),
    "sums": (HIDDEN, SEQ),
    "after": (HIDDEN, SEQ),
}
"""Width and height of every shape."""


def _layers(tensor: str) -> str:
    """Column layers and the row layers after them."""
    forward, backward = communications(tensor)
    bottom = TOP + RANKS * LANE - 12
    cuts = _cuts()
    parts = []
    for at, dim, heading in (("columns", 0, "column layers"), ("rows", 1, "row layers")):
        middle = AT[at] + SIZES[at][0] / 2
        parts.append(text(middle, 14, heading, color=BLUE))
        parts += [text(middle, 32 + 16 * row, names) for row, names in enumerate(_names(cuts[0], dim))]
    for rank in range(RANKS):
        parts += _lane(rank, cuts[rank], TOP + rank * LANE + FEATURES / 2, is_split=tensor != "plain")
    for at, into, back in (("to", forward.column, backward.column), ("from", forward.row, backward.row)):
        parts += _communication(AT[at], into, back, bottom)
    for at, label in (
        ("before", "residual stream"),
        ("input", "input"),
        ("between", "heads features"),
        ("sums", "partial sums"),
        ("after", "residual stream"),
    ):
        middle = AT[at] + SIZES[at][0] / 2
        parts += [text(middle, bottom + 14 + 16 * row, word) for row, word in enumerate(label.split())]
    parts += [text(0, 64, "forward", anchor="start"), text(0, bottom + 58, "backward", anchor="start")]
    title = {
        "plain": f"Tensor parallelism, {RANKS} ranks: a column layer and a row layer between communications",
        "sequence": f"Sequence parallelism, {RANKS} ranks: between two layers the sequence is split",
    }[tensor]
    return svg(title, bottom + 68 + 16 * (max(len(names) for names in backward) - 1), parts)


def _names(cuts: TensorCuts, dim: int) -> list[str]:
    """The layers that are split along a dim of their weight, those of one module in one line."""
    lines: dict[str, list[str]] = {}
    for name in (name for name, cut in cuts.cuts.items() if cut.dim == dim and name.startswith("blocks.0.")):
        module, child, _ = name.rsplit(".", 2)
        lines.setdefault(module, []).append(child)
    return [", ".join(children) for children in lines.values()]


def _communication(
    x: float, forward: tuple[str, ...], backward: tuple[str, ...], bottom: float
) -> Iterator[str]:
    """A bar across the ranks, with what it is in forward above it and in backward below it."""
    yield box(x - 4, 72, 8, bottom - 72, opacity=1 if forward else 0.35, stroke=None)
    for names, top in ((forward, 64), (backward, bottom + 58)):
        for row, name in enumerate(names or ("nothing",)):
            yield text(x, top + 16 * row, name, color=BLUE if names else GRAY)


def _lane(rank: int, cuts: TensorCuts, middle: float, *, is_split: bool) -> Iterator[str]:
    """One rank's shapes, with its part in its colour, and what all ranks have alike in gray."""
    color = COLORS[rank]

    def shape(at: str, *fills: str) -> str:
        width, height = SIZES[at]
        return "\n".join((*fills, frame(AT[at], middle - height / 2, width, height)))

    def fill(at: str, share: tuple[float, float], dim: int, color: str, opacity: float = 1) -> str:
        """From where to where, as a share of the height (dim 0) or of the width."""
        (width, height), (first, part) = SIZES[at], share
        left, top = AT[at], middle - height / 2
        if dim == 0:
            return box(
                left, top + first * height, width, part * height, color=color, opacity=opacity, stroke=None
            )
        return box(left + first * width, top, part * width, height, color=color, opacity=opacity, stroke=None)

    def share(name: str) -> tuple[float, float]:
        cut = cuts.cuts[f"blocks.0.feed_forward.{name}.weight"]
        return cut.offset / cut.shape[cut.dim], cut.length / cut.shape[cut.dim]

    parts = [(each / RANKS, 1 / RANKS) for each in range(RANKS)]
    alike = (0.0, 1.0), 0, GRAY, 0.4
    residual = (parts[rank], 0, color) if is_split else alike
    gathered = [(parts[each], 0, COLORS[each]) for each in range(RANKS)] if is_split else [alike]
    yield text(0, middle + 4, f"rank {rank}", anchor="start")
    yield shape("before", fill("before", *residual))
    yield shape("input", *(fill("input", *each) for each in gathered))
    # Weights are [out, in]; drawn is what the input is multiplied by, [in, out].
    yield shape("columns", fill("columns", share("gate"), 1, color))
    yield shape("between", fill("between", share("gate"), 1, color))
    yield shape("rows", fill("rows", share("down"), 0, color))
    yield shape("sums", fill("sums", (0.0, 1.0), 0, color, 0.35))
    yield shape("after", fill("after", *residual))
    signs = (
        ("input", "columns", "&#215;"),
        ("columns", "between", "="),
        ("between", "rows", "&#215;"),
        ("rows", "sums", "="),
    )
    for left, right, sign in signs:
        yield text((AT[left] + SIZES[left][0] + AT[right]) / 2, middle + 5, sign)
    for left, right in (("before", "input"), ("sums", "after")):
        yield arrow((AT[left] + SIZES[left][0] + 4, middle), (AT[right] - 3, middle))


class Slot(NamedTuple):
    """Something on a lane of the time chart.

    Attributes:
        start: When, in products of one part.
        stop: As well.
        label: Which part is sent or computed with, or what of all parts.
    """

    start: float
    stop: float
    label: str


TRANSFER = 0.75  # of a part, in products of a part
BETWEEN = 0.8  # what is a rank's own work between the two layers, drawn shortened
UNIT = 39.5  # from one product of a part to the next
CHART = 108  # where time begins
LANE_HEIGHT = 20


def timed(events: Sequence[Event], *, sums: bool) -> tuple[list[Slot], list[Slot], float]:
    """When a rank communicates, when it computes, and when it is done.

    The product of a part takes 1, its transfer `TRANSFER`. A transfer begins when it is started, and a wait
    lasts until its end.

    Args:
        events: Of one layer's forward.
        sums: Whether it sends what it has computed, not what it is to compute with.
    """
    sent: list[Slot] = []
    computed: list[Slot] = []
    now = 0.0
    for event in events:
        if event.kind == "start":
            is_part = event.name == "shift"
            label = event.name if not is_part else computed[-1].label if sums else _part(event)
            sent.append(Slot(now, now + TRANSFER * (1 if is_part else RING - 1), label))
        elif event.kind == "wait":
            now = max(now, sent[-1].stop)
        elif event.kind == "multiply":
            parts = event.tensors[0].shape[0] // 4
            computed.append(Slot(now, now + parts, _part(event) if parts == 1 else "product"))
            now += parts
    return sent, computed, now


def _part(event: Event) -> str:
    """Which part of the sequence it is, from what the program put there."""
    return str(round(event.tensors[0].flatten()[0].item()) - 1)


def _chart() -> str:
    """A column layer and a row layer in time, with and without overlap."""
    parts: list[str] = []
    ends = []
    for row, tensor in enumerate(("sequence", "async")):
        top = 24 + row * 96
        events = watch_products(tensor, RING)[0]
        parts.append(text(0, top - 8, f"tensor={tensor}", anchor="start", color=BLUE))
        for lane, name in enumerate(("network", "rank 0")):
            middle = top + LANE_HEIGHT / 2 + lane * (LANE_HEIGHT + 4)
            parts.append(text(0, middle + 4, name, anchor="start"))
        column_end, drawn = _phase(section(events, "column forward"), 0.0, top, sums=False)
        parts += drawn
        left = CHART + column_end * UNIT
        parts.append(
            box(
                left, top + LANE_HEIGHT + 4, BETWEEN * UNIT, LANE_HEIGHT, color=GRAY, opacity=0.3, stroke=None
            )
        )
        end, drawn = _phase(section(events, "row forward"), column_end + BETWEEN, top, sums=True)
        parts += drawn
        ends.append(end)
        below = top + 2 * LANE_HEIGHT + 20
        parts.append(text(CHART + column_end * UNIT / 2, below, "column layer"))
        parts.append(text(CHART + (column_end + BETWEEN + end) * UNIT / 2, below, "row layer"))
    late, early = (CHART + end * UNIT for end in ends)
    middle = 24 + 96 + LANE_HEIGHT + 2
    for x in (early, late):
        parts.append(line((x, 20 if x == late else 116), (x, middle + LANE_HEIGHT + 6), width=1, dashed=True))
    parts.append(arrow((late - 3, middle), (early + 4, middle), stands_out=True))
    parts.append(text((early + late) / 2, middle - 8, "saved", color=BLUE))
    return svg("Asynchronous tensor parallelism in time: parts travel beside the products", 184, parts)


def _phase(events: Sequence[Event], start: float, top: float, *, sums: bool) -> tuple[float, list[str]]:
    """Where one layer ends, and its boxes on both lanes."""
    sent, computed, length = timed(events, sums=sums)
    parts = []
    for lane, (slots, color) in enumerate(((sent, ORANGE), (computed, BLUE))):
        for slot in slots:
            left, width = CHART + (start + slot.start) * UNIT, (slot.stop - slot.start) * UNIT
            above = top + lane * (LANE_HEIGHT + 4)
            parts.append(
                box(left + 0.5, above, width - 1, LANE_HEIGHT, color=color, stroke=None, label=slot.label)
            )
    return start + length, parts
