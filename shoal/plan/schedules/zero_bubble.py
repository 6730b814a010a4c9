"""Schedules that fill the bubble with gradients of weights: ZB-H1 and ZB-V.

Qi et al., arXiv:2401.10241 (ZB-H1) and arXiv:2405.15362 (ZB-V: with two stages a rank in a V, the first rank
also has the last stage, so that all ranks hold equally much). I is the gradient of a stage's input, for which
the previous stage waits; W is the gradient of its weights, for which nothing waits until the step ends.
"""

from __future__ import annotations

from shoal.plan.schedules.action import Action
from shoal.plan.schedules.kind import Held, Kind
from shoal.plan.schedules.row import Row


def _h1_row(rank: int, ranks: int, virtual: int, microbatches: int) -> tuple[Action, ...]:
    """Return 1F1B with W `rank` micro-batches behind I: every rank holds as much as 1F1B's first rank."""
    first = min(ranks - 1 - rank, microbatches)
    row = Row()
    for _ in range(first):
        row.forward(rank)
    for index in range(microbatches):
        if index < microbatches - first:
            row.forward(rank)
        row.input(rank)
        if index >= rank:
            row.weight([rank])
    row.weights([rank])
    return row.actions(microbatches)


def _v_row(rank: int, ranks: int, virtual: int, microbatches: int) -> tuple[Action, ...]:
    """Return F, I and W of the stage on the way down and of the one on the way up, in turn.

    The pattern needs 2 ranks - 1 micro-batches or more; for fewer, the actions of missing ones are left out.
    """
    down, up = rank, 2 * ranks - 1 - rank
    least = max(microbatches, 2 * ranks - 1)
    row = Row()
    for _ in range(2 * (ranks - rank) - 1):
        row.forward(down)
    for _ in range(rank):
        row.forward(up)
        row.forward(down)
    for _ in range(ranks - rank):
        row.forward(up)
        row.input(up)
        row.weight([up])
    while row.forwards(up) < least:
        if row.forwards(down) < least:
            row.forward(down)
        row.input(down)
        row.weight([down])
        row.forward(up)
        row.input(up)
        row.weight([up])
    for _ in range(rank):
        row.input(down)
        row.input(up)
    for _ in range(ranks - rank):
        row.input(down)
        row.weight([down])
    row.weights([up])
    row.weights([down])
    return row.actions(microbatches)


def _h1_held(rank: int, ranks: int, virtual: int, microbatches: int, limit: int | None) -> tuple[Held, ...]:
    ahead = min(ranks - 1 - rank, microbatches)
    whole = min(ranks - rank, microbatches)
    return (Held((float(whole),), (float(min(rank, max(0, microbatches - 1 - ahead))),)),)


def _v_held(rank: int, ranks: int, virtual: int, microbatches: int, limit: int | None) -> tuple[Held, ...]:
    """Return what is held before the first backward, and in the steady state before a backward."""
    down, up = 2 * ranks - 1 - rank, rank + 1
    first = Held((float(min(down, microbatches)), float(min(up, microbatches))), (0.0, 0.0))
    if microbatches <= down:
        return (first,)
    return first, Held((down + 1.0, up - 1.0), (0.0, 0.0))


ZB_H1 = Kind(name="zb-h1", row=_h1_row, held=_h1_held, has_halves=True)
ZB_V = Kind(
    name="zb-v",
    row=_v_row,
    held=_v_held,
    least_virtual=2,
    most_virtual=2,
    v_of=2,
    has_halves=True,
)
