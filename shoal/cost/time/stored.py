"""Bytes of activations that a rank has in files from forward to backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shoal.cost.layout import Layout
from shoal.cost.memory.activations import kept_bytes
from shoal.cost.time.split import stored_pieces
from shoal.plan import SettledPlan
from shoal.workload import Block, Workload


class Stored(NamedTuple):
    """Bytes of a micro-batch's activations on a rank.

    Attributes:
        every: Bytes in files.
        last: Bytes in files of blocks at the end of a stage, whose backward waits for them when it begins.
    """

    every: float = 0.0
    last: float = 0.0


def stored_bytes(
    workload: Workload,
    plan: SettledPlan,
    stages: Sequence[range],
    pieces: Sequence[Block],
    layout: Layout,
    place: int,
) -> Stored:
    """Return the bytes of activations on a rank.

    Args:
        workload: The Workload.
        plan: The Plan.
        stages: The pieces of each stage.
        pieces: The Workload's pieces, those that recompute leaves out as kept.
        layout: The Plan's layout, settled.
        place: The rank's place along the pipeline.
    """
    if not plan.tiers.has_files:
        return Stored()
    stored = stored_pieces(workload, plan, stages)
    known: dict[Block, float] = {}
    every = last = 0.0
    for stage, rank in zip(stages, plan.placement if plan.pp > 1 else (0,), strict=True):
        layers = range(max(stage.start, 1), min(stage.stop, len(workload.layers) + 1))
        for piece in layers if rank == place else ():
            if piece not in stored:
                continue
            block = pieces[piece]
            if block not in known:
                known[block] = kept_bytes(block, workload, layout, is_layer=True)
            every += known[block]
            if piece == layers[-1]:
                last += known[block]
    return Stored(every, last)
