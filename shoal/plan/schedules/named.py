"""The schedules by name: whose rows follow from ranks, stages and micro-batches alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shoal.errors import PlanError
from shoal.plan.schedules.action import Action
from shoal.plan.schedules.breadth_first import breadth_first_row, gpipe_row
from shoal.plan.schedules.dualpipe_v import dualpipe_v_row
from shoal.plan.schedules.kinds import FOUND, placement_of, require_numbers
from shoal.plan.schedules.one_forward_one_backward import interleaved_row, one_forward_one_backward_row
from shoal.plan.schedules.schedule import Schedule
from shoal.plan.schedules.zero_bubble import zb_h1_row, zb_v_row

__all__ = ["NAMES", "make"]

_ROWS: Mapping[str, Callable[[int, int, int, int], tuple[Action, ...]]] = {
    "gpipe": gpipe_row,
    "1f1b": one_forward_one_backward_row,
    "interleaved": interleaved_row,
    "looped-bfs": breadth_first_row,
    "zb-h1": zb_h1_row,
    "zb-v": zb_v_row,
    "dualpipe-v": dualpipe_v_row,
}
"""By name, what makes the actions of a rank, given rank, ranks, virtual and micro-batches."""

NAMES: tuple[str, ...] = tuple(_ROWS)
"""All schedules that have a name."""


def make(name: str, ranks: int, virtual: int, microbatches: int) -> Schedule:
    """The table of a named schedule.

    Args:
        name: One of `NAMES`.
        ranks: Pipeline-parallel degree.
        virtual: Stages on a rank.
        microbatches: Micro-batches in a step.

    Raises:
        PlanError: There is no schedule of that name, or it cannot be made for these numbers.
    """
    require_numbers(name, ranks, virtual, microbatches)
    if name not in _ROWS:
        raise PlanError(
            f"the schedule {name} has no table of its own: it is found for given times",
            possible=f"one of {', '.join(NAMES)}",
            change=f"choose one of these, or call {FOUND}(...)",
        )
    return Schedule(
        name=name,
        ranks=ranks,
        virtual=virtual,
        microbatches=microbatches,
        placement=placement_of(name, ranks, virtual),
        table=tuple(_ROWS[name](rank, ranks, virtual, microbatches) for rank in range(ranks)),
    )
