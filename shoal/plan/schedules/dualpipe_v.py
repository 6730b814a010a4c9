"""DualPipe-V: DeepSeek's DualPipe cut in half.

DeepSeek-AI, arXiv:2412.19437, and their published schedule (github.com/deepseek-ai/DualPipe). DualPipe feeds
micro-batches in from both ends and so keeps every weight twice. Folded in the middle, each rank has two
stages in a V and each weight once. In the steady state a forward stands directly before the backward of
another micro-batch, so that the communication of one (experts) can hide behind the compute of the other.
"""

from __future__ import annotations

from shoal.plan.schedules.action import Action
from shoal.plan.schedules.kind import Held, Kind
from shoal.plan.schedules.row import Row


def _row(rank: int, ranks: int, virtual: int, microbatches: int) -> tuple[Action, ...]:
    """Return the eight parts of the published schedule; W is apart from I where that shortens the bubble."""
    down, up = rank, 2 * ranks - 1 - rank
    both = (down, up)
    behind = ranks - 1 - rank
    row = Row()
    for _ in range(2 * behind):
        row.forward(down)
    for _ in range(rank + 1):
        row.forward(down)
        row.forward(up)
    for _ in range(behind):
        row.input(up)
        row.weight(both)
        row.forward(up)
    for _ in range(microbatches - 2 * ranks + rank + 1):
        row.forward(down)
        row.backward(up)
        row.forward(up)
        row.backward(down)
    for _ in range(behind):
        row.backward(up)
        row.forward(up)
        row.backward(down)
    # From the middle of the last backwards on, W waits until the end.
    for index in range(2 * (rank + 1)):
        stage = down if index % 2 else up
        if index <= rank:
            row.backward(stage)
        else:
            row.input(stage)
    for _ in range(behind):
        row.weight(both)
        row.input(down)
    row.weights(both)
    return row.actions(microbatches)


def _held(rank: int, ranks: int, virtual: int, microbatches: int, limit: int | None) -> tuple[Held, ...]:
    return (Held((float(2 * ranks - rank), rank + 1.0), (0.0, 0.0)),)


DUALPIPE_V = Kind(
    name="dualpipe-v",
    row=_row,
    held=_held,
    least_virtual=2,
    most_virtual=2,
    v_of=2,
    microbatches_per_rank=2,
    has_halves=True,
)
