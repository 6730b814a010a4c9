"""A lower bound on a step's time, computed in a microsecond: a search skips most Plans by it.

`shoal.cost.time.step` takes pace + fill + sends + data + update. With W the seconds of all blocks for a
micro-batch, the slowest of p ranks has S >= W / p. So with m micro-batches and v stages on a rank

    pace + fill = m S + (W - S) / v = (m - 1 / v) S + W / v

This is least where S is least, as m >= 1 / v. Schedules that fill the bubble with weight gradients leave at
least (W - S) / (3 p v) of it. The other parts are at least 0.
"""

from __future__ import annotations

from shoal.plan.schedules import kind_of

__all__ = ["least_seconds"]


def least_seconds(
    ranks: int, microbatches: int, schedule: str, virtual: int, work: float, slowest: float = 0.0
) -> float:
    """Return a lower bound on the seconds of a step, for any sharding of the state.

    Args:
        ranks: Ranks of the pipeline.
        microbatches: Micro-batches of a step.
        schedule: Name of the schedule.
        virtual: Stages on a rank.
        work: Seconds of all blocks, forward and backward, for one micro-batch on the ranks of one replica: W
            in the formula.
        slowest: Seconds of these that the slowest rank has at least, if that is known to exceed its equal
            share.
    """
    if ranks == 1:
        return microbatches * work
    left = 3 * ranks * virtual if kind_of(schedule).bubble_fill else virtual
    return (microbatches - 1 / left) * max(slowest, work / ranks) + work / left
