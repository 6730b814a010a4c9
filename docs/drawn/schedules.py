"""Draws the pipeline schedules, as `shoal schedule --svg` does."""

from __future__ import annotations

from shoal.spec.plan.schedules import NAMES, Played, Times, kind_of, make, play
from shoal.spec.plan.schedules.draw import draw

__all__ = ["MICROBATCHES", "RANKS", "pictures", "played"]

RANKS, MICROBATCHES = 4, 8


def pictures() -> dict[str, str]:
    """The text of every picture, by the name of its file."""
    return {
        f"schedule-{name}.svg": draw(
            [played(name)], f"The schedule {name}: four ranks, eight micro-batches, F = I = W"
        )
        for name in NAMES
    }


def played(name: str, ranks: int = RANKS, microbatches: int = MICROBATCHES) -> Played:
    """A schedule whose ranks take one unit of time for F, I and W of a micro-batch each.

    The stages are as few as the schedule takes; looped breadth-first, which with one is GPipe, has two.
    """
    virtual = kind_of(name).usual_virtual
    schedule = make(name, ranks, virtual, microbatches)
    return play(schedule, Times.equal(schedule.stages, *(1 / virtual for _ in range(3))))
