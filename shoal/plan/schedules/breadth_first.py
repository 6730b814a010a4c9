"""Schedules that take all micro-batches through a stage before the next: GPipe, and looped breadth-first.

GPipe: Huang et al., arXiv:1811.06965. Looped breadth-first: Lamy-Poirier, arXiv:2211.05953, in which a
gradient of a stage's weights is complete early, so that its reduction hides behind the other stages.
"""

from __future__ import annotations

from shoal.plan.schedules.action import Action, Work

__all__ = ["breadth_first_row", "gpipe_row"]


def gpipe_row(rank: int, ranks: int, virtual: int, microbatches: int) -> tuple[Action, ...]:
    """All forwards, then all backwards. The paper takes the backwards in reverse, torch and this in order."""
    return tuple(
        Action(work, rank, microbatch)
        for work in (Work.FORWARD, Work.BACKWARD)
        for microbatch in range(microbatches)
    )


def breadth_first_row(rank: int, ranks: int, virtual: int, microbatches: int) -> tuple[Action, ...]:
    """All forwards of stage after stage, then all backwards in reverse."""
    forwards = [
        (stage, microbatch)
        for stage in range(rank, ranks * virtual, ranks)
        for microbatch in range(microbatches)
    ]
    return (
        *(Action(Work.FORWARD, *each) for each in forwards),
        *(Action(Work.BACKWARD, *each) for each in reversed(forwards)),
    )
