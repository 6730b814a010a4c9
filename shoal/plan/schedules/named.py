"""The schedules by name, and what each asks of ranks, virtual stages and micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shoal.errors import PlanError, nearest
from shoal.plan.schedules.action import Action
from shoal.plan.schedules.breadth_first import breadth_first_row, gpipe_row
from shoal.plan.schedules.dualpipe_v import dualpipe_v_row
from shoal.plan.schedules.one_forward_one_backward import interleaved_row, one_forward_one_backward_row
from shoal.plan.schedules.schedule import Schedule, looped, v_shaped
from shoal.plan.schedules.zero_bubble import zb_h1_row, zb_v_row

__all__ = ["NAMES", "least_virtual", "make"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Named:
    """A schedule's rows, and what it can be made for.

    Attributes:
        row: Makes the actions of a rank, given rank, ranks, virtual and micro-batches.
        least_virtual: The fewest stages on a rank.
        most_virtual: The most; None if there is no limit.
        is_v_shaped: Whether the stages go down the ranks and up again.
        microbatches_per_rank: By how many times the ranks the micro-batches must at least be; 0: any number.
        in_rounds: Whether they must be a multiple of the ranks.
    """

    row: Callable[[int, int, int, int], tuple[Action, ...]]
    least_virtual: int = 1
    most_virtual: int | None = 1
    is_v_shaped: bool = False
    microbatches_per_rank: int = 0
    in_rounds: bool = False


_SCHEDULES: Mapping[str, _Named] = {
    "gpipe": _Named(row=gpipe_row),
    "1f1b": _Named(row=one_forward_one_backward_row),
    "interleaved": _Named(row=interleaved_row, least_virtual=2, most_virtual=None, in_rounds=True),
    "looped-bfs": _Named(row=breadth_first_row, most_virtual=None),
    "zb-h1": _Named(row=zb_h1_row),
    "zb-v": _Named(row=zb_v_row, least_virtual=2, most_virtual=2, is_v_shaped=True),
    "dualpipe-v": _Named(
        row=dualpipe_v_row, least_virtual=2, most_virtual=2, is_v_shaped=True, microbatches_per_rank=2
    ),
}

NAMES: tuple[str, ...] = tuple(_SCHEDULES)
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
    named = _find(name)
    for what, number in (("ranks", ranks), ("virtual stages", virtual), ("micro-batches", microbatches)):
        if number < 1:
            raise PlanError(
                f"a schedule of {number} {what} was asked for",
                possible="1 or more",
                change=f"give more {what}",
            )
    _require_virtual(name, named, virtual)
    _require_microbatches(name, named, ranks, microbatches)
    return Schedule(
        name=name,
        ranks=ranks,
        virtual=virtual,
        microbatches=microbatches,
        placement=v_shaped(ranks) if named.is_v_shaped else looped(ranks, virtual),
        table=tuple(named.row(rank, ranks, virtual, microbatches) for rank in range(ranks)),
    )


def least_virtual(name: str) -> int:
    """The fewest stages on a rank that the schedule is made for.

    Raises:
        PlanError: There is no schedule of that name.
    """
    return _find(name).least_virtual


def _find(name: str) -> _Named:
    if name not in _SCHEDULES:
        raise PlanError(
            f"there is no schedule {name!r}{nearest(name, NAMES)}",
            possible=f"one of {', '.join(NAMES)}",
            change="choose one of these",
        )
    return _SCHEDULES[name]


def _require_virtual(name: str, named: _Named, virtual: int) -> None:
    least, most = named.least_virtual, named.most_virtual
    if virtual >= least and (most is None or virtual <= most):
        return
    stages = "stages" if virtual > 1 else "stage"
    given = f"the schedule {name} was asked for with {virtual} virtual {stages} on a rank"
    if most is None:
        raise PlanError(
            given,
            possible=f"{least} or more; with one it would be 1f1b",
            change=f"give {least} virtual stages, or choose 1f1b",
        )
    fitting = [
        other
        for other, each in _SCHEDULES.items()
        if virtual >= each.least_virtual and (each.most_virtual is None or virtual <= each.most_virtual)
    ]
    raise PlanError(
        given,
        possible=f"exactly {least}",
        change=f"give {least}, or choose a schedule for {virtual}: {', '.join(fitting)}",
    )


def _require_microbatches(name: str, named: _Named, ranks: int, microbatches: int) -> None:
    least = named.microbatches_per_rank * ranks
    if microbatches < least:
        raise PlanError(
            f"the schedule {name} was asked for with {microbatches} micro-batches on {ranks} ranks",
            possible=f"{least} micro-batches or more: {named.microbatches_per_rank} for each rank",
            change=f"give {least} micro-batches, or choose another schedule",
        )
    if named.in_rounds and microbatches % ranks:
        lower, upper = microbatches // ranks * ranks, -(-microbatches // ranks) * ranks
        raise PlanError(
            f"the schedule {name} was asked for with {microbatches} micro-batches on {ranks} ranks",
            possible=f"a multiple of {ranks}",
            change="give "
            + (f"{lower} or {upper}" if lower else f"{upper}")
            + ", or choose another schedule",
        )
