"""Schedules that run all micro-batches through a stage before the next: GPipe, and looped breadth-first.

GPipe: Huang et al., arXiv:1811.06965. Looped breadth-first: Lamy-Poirier, arXiv:2211.05953, where a gradient
    of a stage's weights is complete early, so that its reduction hides behind the other stages.
"""

from __future__ import annotations

from shoal.plan.schedules.action import Action, Work
from shoal.plan.schedules.kind import Held, Kind


def _gpipe_row(rank: int, ranks: int, virtual: int, microbatches: int) -> tuple[Action, ...]:
    """Return all forwards, then all backwards: in reverse in the paper, in order in torch and here."""
    return tuple(
        Action(work, rank, microbatch)
        for work in (Work.FORWARD, Work.BACKWARD)
        for microbatch in range(microbatches)
    )


def _breadth_first_row(rank: int, ranks: int, virtual: int, microbatches: int) -> tuple[Action, ...]:
    """Return all forwards, stage after stage, then all backwards in reverse."""
    forwards = [
        (stage, microbatch)
        for stage in range(rank, ranks * virtual, ranks)
        for microbatch in range(microbatches)
    ]
    return (
        *(Action(Work.FORWARD, *each) for each in forwards),
        *(Action(Work.BACKWARD, *each) for each in reversed(forwards)),
    )


def _held(rank: int, ranks: int, virtual: int, microbatches: int, limit: int | None) -> tuple[Held, ...]:
    return (Held((float(microbatches),) * virtual, (0.0,) * virtual),)


GPIPE = Kind(name="gpipe", row=_gpipe_row, held=_held)
BREADTH_FIRST = Kind(
    name="looped-bfs",
    row=_breadth_first_row,
    held=_held,
    most_virtual=None,
)
