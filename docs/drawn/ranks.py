"""Draws the exchange with experts, and which ranks are neighbours along what, as the code has it."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from drawn.svg import BLUE, COLORS, WIDTH, arrow, box, text
from drawn.svg import svg as drawing
from drawn.watched import watch
from shoal.models import Mixture, TransformerConfig
from shoal.models.experts import run_experts
from shoal.models.grouped_matmul import Multiply, Runs
from shoal.parallel.axes import Axes
from shoal.parallel.expert.expert import cut_experts, expert_parallel
from shoal.record import NullRecorder
from shoal.spec.plan import AXES, Mesh, Plan

__all__ = ["CHOSEN", "Row", "axes_of", "pictures", "rows_to_experts"]

RANKS = 4
EXPERTS = 8
CHOSEN = (
    ((0, 3), (5, 0), (3, 6)),
    ((1, 4), (3, 2), (7, 3)),
    ((6, 5), (3, 0), (2, 7)),
    ((3, 1), (4, 7), (0, 2)),
)
"""By rank and token, the experts that the picture's router chooses, the likeliest first."""

PLAN = Plan.parse("pp=2,dp=4,replicate=2,shard=zero3,cp=2,tp=2,ep=4")


def pictures() -> dict[str, str]:
    """The text of every picture, by the name of its file."""
    return {"expert-parallel.svg": _experts(), "mesh.svg": _mesh()}


class Row(NamedTuple):
    """A token on its way to an expert."""

    sender: int
    token: int
    expert: int


def rows_to_experts() -> tuple[list[list[Row]], list[list[Row]]]:
    """What every rank sends, in the order in which it lies there, and what every rank's experts get."""
    shape = TransformerConfig(
        vocab_size=2, layers=1, hidden=EXPERTS + 2, heads=1, kv_heads=1, ffn=4, seq=8, experts=EXPERTS
    )

    def program(axis: Any) -> None:
        mixture = Mixture(shape).requires_grad_(requires_grad=False)
        for parameter in mixture.parameters():
            parameter.zero_()
        for name, cut in cut_experts(mixture, axis).items():
            kind = name.rpartition(".")[2]
            setattr(mixture, kind, nn.Parameter(cut.of(getattr(mixture, kind)), requires_grad=False))
        mixture.router.weight.copy_(torch.eye(EXPERTS, EXPERTS + 2))
        hidden = torch.zeros(1, len(CHOSEN[0]), EXPERTS + 2)
        for token, (first, second) in enumerate(CHOSEN[axis.index]):
            hidden[0, token, [first, second, -2, -1]] = torch.tensor([2.0, 1.0, token, axis.index])
        expert_parallel(mixture, axis)

        def watched_experts(rows: Tensor, runs: Runs, *weights: Tensor, multiply: Multiply) -> Tensor:
            axis.note("experts", rows, runs.counts)
            return run_experts(rows, runs, *weights, multiply=multiply)

        with patch("shoal.parallel.expert.expert.run_experts", watched_experts):
            mixture(hidden)

    def listed(rows: Tensor, counts: Tensor, first: int) -> list[Row]:
        experts = (torch.arange(len(counts)) + first).repeat_interleave(counts)
        return [
            Row(int(row[-1]), int(row[-2]), expert)
            for row, expert in zip(rows, experts.tolist(), strict=True)
        ]

    leaving, arrived = [], []
    for rank, events in enumerate(watch(program, RANKS)):
        counts, rows, _ = (event.tensors[0] for event in events if event.kind == "start")
        (at_experts,) = (event.tensors for event in events if event.kind == "experts")
        leaving.append(listed(rows, counts, 0))
        arrived.append(listed(*at_experts, rank * (EXPERTS // RANKS)))
    return leaving, arrived


def axes_of(rank: int) -> Axes:
    """The axes of `PLAN`, as a rank sees them."""
    dist.init_process_group("fake", rank=rank, world_size=PLAN.ranks, store=FakeStore())
    try:
        return Axes.build(PLAN, NullRecorder())
    finally:
        dist.destroy_process_group()


MARGIN = 92  # left of the ranks
WIDE = 13.5  # of a row's box
HIGH = 18
FIRST, SECOND, THIRD = 44, 132, 220  # tops of the boxes: before, at the experts, after


def _experts() -> str:
    """Rows of tokens go to the ranks of their experts, and come back."""
    leaving, arrived = rows_to_experts()
    apart = (WIDTH - MARGIN) / RANKS
    parts: list[str] = []

    def place(rank: int, index: int) -> float:
        return MARGIN + rank * apart + index * WIDE + WIDE / 2

    at_home = {row: place(rank, index) for rank, rows in enumerate(leaving) for index, row in enumerate(rows)}
    at_expert = {
        row: place(rank, index) for rank, rows in enumerate(arrived) for index, row in enumerate(rows)
    }
    for row in sorted(at_home, reverse=True):
        for start, end, top, bottom in (
            (at_home, at_expert, FIRST, SECOND),
            (at_expert, at_home, SECOND, THIRD),
        ):
            ends = (start[row], top + HIGH + 2), (end[row], bottom - 2)
            parts.append(arrow(*ends, stands_out=row.sender == 0))
    for top, places in ((FIRST, at_home), (SECOND, at_expert), (THIRD, at_home)):
        for row, x in places.items():
            color, label = COLORS[row.sender], str(row.expert)
            parts.append(box(x - WIDE / 2 + 0.5, top, WIDE - 1, HIGH, color=color, stroke=None, label=label))
    held = EXPERTS // RANKS
    for rank in range(RANKS):
        keeps = ", ".join(str(rank * held + each) for each in range(held))
        x = MARGIN + rank * apart
        parts.append(text(x, 14, f"rank {rank}", anchor="start", color=COLORS[rank]))
        parts.append(text(x, 32, f"experts {keeps}", anchor="start"))
    for top, name in ((FIRST, "router"), (SECOND, "experts"), (THIRD, "sum")):
        parts.append(text(0, top + 13, name, anchor="start"))
    for top in (FIRST, SECOND):
        parts.append(text(0, top + 57, "all-to-all", anchor="start", color=BLUE))
    return drawing(
        "Expert parallelism, four ranks: rows of tokens go to experts and come back", THIRD + HIGH + 4, parts
    )


SIDE = 21  # of a rank of the mesh
BEGIN = 80  # left of rank 0
ELSEWHERE = 30  # of the ranks of the other stage, drawn as one
ROW = 25
GROUPS = 17  # from one row of groups to the next


def _mesh() -> str:
    """The axes over the ranks, the outermost on top; and the groups of rank 0."""
    mesh = Mesh.of(PLAN)
    here = mesh.ranks // PLAN.pp  # ranks of the first stage; the second is laid out alike
    places = [axes_of(rank).ep.index for rank in range(here)]
    end = BEGIN + here * SIDE
    parts = []
    for row, axis in enumerate(AXES):
        blocks = (
            mesh.groups(*AXES[row + 1 :]) if row + 1 < len(AXES) else [(rank,) for rank in range(mesh.ranks)]
        )
        parts.append(text(0, 2 + row * ROW + 15, axis, anchor="start"))
        for block in blocks:
            if block[0] < here:
                parts.append(_coordinate(block[0], len(block), row, mesh.coordinate(block[0], axis)))
    top = 2 + len(AXES) * ROW
    parts += [
        text(0, top + 13, "rank", anchor="start"),
        *(text(BEGIN + (rank + 0.5) * SIDE, top + 13, str(rank), size=10) for rank in range(here)),
        text(0, top + 37, "ep", anchor="start"),
        *(_coordinate(rank, 1, 5.9, place) for rank, place in enumerate(places)),
        box(end + 8, 2, ELSEWHERE, ROW - 5, color=COLORS[1], stroke=None, label="1"),
        text(end + 8 + ELSEWHERE / 2, top + 13, f"{here} …", size=10),
    ]
    below = top + 72
    parts.append(text(BEGIN, below - 10, "the groups of rank 0", anchor="start", color=BLUE))
    parts.append(text(end + ELSEWHERE + 24, below - 10, "what goes along them", anchor="start", color=BLUE))
    axes = axes_of(0)
    groups = (
        ("pp", "activations", mesh.group(0, "pp")),
        ("replicate", "gradients", axes.dense.replicate.members),
        ("shard, cp", "gradients, weights", axes.dense.shard.members),
        ("cp", "keys and values", axes.cp.members),
        ("tp", "residual stream", axes.tp.members),
        ("ep", "rows of tokens", axes.ep.members),
    )
    for row, (name, what, members) in enumerate(groups):
        at = below + row * GROUPS
        parts.append(text(0, at + 11, name, anchor="start"))
        parts.append(text(end + ELSEWHERE + 24, at + 11, what, anchor="start"))
        for rank in (*range(here), here):
            left, wide = (BEGIN + rank * SIDE, SIDE) if rank < here else (end + 8, ELSEWHERE)
            opacity = 1 if rank in members else 0.12
            parts.append(box(left + 0.5, at, wide - 1, GROUPS - 4, opacity=opacity, stroke=None))
    title = f"The mesh of {PLAN}: which ranks are neighbours along which axis"
    return drawing(title, below + len(groups) * GROUPS, parts)


def _coordinate(first: int, ranks: int, row: float, index: int) -> str:
    """A run of ranks with the same place along an axis."""
    left = BEGIN + first * SIDE + 0.5
    return box(
        left, 2 + row * ROW, ranks * SIDE - 1, ROW - 5, color=COLORS[index], stroke=None, label=str(index)
    )
