"""All kinds of schedules by name. To add one, add an entry here, with its `Kind` beside its rows."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.errors import PlanError, nearest
from shoal.plan.schedules.breadth_first import BREADTH_FIRST, GPIPE
from shoal.plan.schedules.dualpipe_v import DUALPIPE_V
from shoal.plan.schedules.found import FOUND, SEARCHED
from shoal.plan.schedules.kind import Kind
from shoal.plan.schedules.one_forward_one_backward import INTERLEAVED, ONE_FORWARD_ONE_BACKWARD
from shoal.plan.schedules.schedule import Schedule
from shoal.plan.schedules.zero_bubble import ZB_H1, ZB_V

KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        *(GPIPE, ONE_FORWARD_ONE_BACKWARD, INTERLEAVED, BREADTH_FIRST),
        *(ZB_H1, ZB_V, DUALPIPE_V, SEARCHED),
    )
}

NAMES: tuple[str, ...] = tuple(name for name, kind in KINDS.items() if kind.row is not None)
"""The schedules that have a table of their own, determined by ranks, stages and micro-batches."""


def kind_of(name: str) -> Kind:
    """Return the kind with this name.

    Raises:
        PlanError: There is no schedule with this name.
    """
    if name not in KINDS:
        raise PlanError(
            f"there is no schedule {name!r}{nearest(name, KINDS)}",
            possible=f"one of {', '.join(KINDS)}",
            change="choose one of these",
        )
    return KINDS[name]


def make(name: str, ranks: int, virtual: int, microbatches: int) -> Schedule:
    """Return the table of a named schedule.

    Args:
        name: One of `NAMES`.
        ranks: Pipeline-parallel degree.
        virtual: Stages on a rank.
        microbatches: Micro-batches in a step.

    Raises:
        PlanError: There is no schedule with this name, or it cannot be made for these numbers.
    """
    require_numbers(name, ranks, virtual, microbatches)
    kind = kind_of(name)
    if kind.row is None:
        raise PlanError(
            f"the schedule {name} has no fixed table: it is computed from given times",
            possible=f"one of {', '.join(NAMES)}",
            change=f"choose one of these, or call {FOUND}(...)",
        )
    return Schedule(
        name=name,
        ranks=ranks,
        virtual=virtual,
        microbatches=microbatches,
        placement=kind.placement(ranks, virtual),
        table=tuple(kind.row(rank, ranks, virtual, microbatches) for rank in range(ranks)),
    )


def require_numbers(name: str, ranks: int, virtual: int, microbatches: int) -> None:
    """Check that a schedule can be made for these numbers, without making it.

    Raises:
        PlanError: There is no schedule with this name, or it cannot be made for these numbers.
    """
    kind = kind_of(name)
    for what, number in (("ranks", ranks), ("virtual stages", virtual), ("micro-batches", microbatches)):
        if number < 1:
            raise PlanError(
                f"a schedule of {number} {what} was asked for",
                possible="1 or more",
                change=f"give more {what}",
            )
    _require_virtual(kind, virtual)
    kind.require_microbatches(ranks, microbatches)


def _require_virtual(kind: Kind, virtual: int) -> None:
    if kind.takes_virtual(virtual):
        return
    least, most = kind.least_virtual, kind.most_virtual
    stages = "stages" if virtual > 1 else "stage"
    given = f"the schedule {kind.name} was asked for with {virtual} virtual {stages} on a rank"
    if most is None:
        raise PlanError(
            given,
            possible=f"{least} or more; with one this schedule is 1f1b",
            change=f"give {least} virtual stages, or choose 1f1b",
        )
    fitting = [other for other, each in KINDS.items() if each.takes_virtual(virtual)]
    raise PlanError(
        given,
        possible=f"exactly {least}",
        change=f"give {least}, or choose a schedule for {virtual}: {', '.join(fitting)}",
    )
