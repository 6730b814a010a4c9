"""Seconds of a step where ranks outnumber the cores that they compute on.

Rates that were measured with all ranks busy are those of a share of a core: with c ranks for each core, about
one in c of it. A rank that waits, as a pipeline makes it, lends its share to the others. So a step takes the
longer of

    the work of all ranks, shared among the cores: the seconds that a rank is busy, the mean over ranks
    the longest chain of work and waits, each at the rate of a rank that has a core for itself: step / c
"""

from __future__ import annotations

__all__ = ["crowded_seconds"]


def crowded_seconds(step: float, idle: float, crowding: float) -> float:
    """Seconds of a step.

    Args:
        step: Seconds as they would be if no rank lent its core.
        idle: Seconds of it that a rank waits for others, the mean over ranks.
        crowding: Ranks for each core, 1 or more.
    """
    return max(step - idle, step / crowding)
