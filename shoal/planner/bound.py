"""A bound that no step under a Plan is quicker than, in a microsecond: what lets a search skip most Plans.

`shoal.cost.time.step` takes pace + fill + sends + data + update. With W the seconds of all blocks for a
micro-batch, the slowest of p ranks has S >= W / p. So with m micro-batches and v stages on a rank

    pace + fill = m S + (W - S) / v = (m - 1 / v) S + W / v

which is least where S is, as m >= 1 / v. Schedules that fill the bubble with weight gradients leave at least
(W - S) / (3 p v) of it. The other parts are at least 0.
"""

from __future__ import annotations

from shoal.plan.schedules import kind_of

__all__ = ["least_seconds"]


def least_seconds(
    ranks: int, microbatches: int, schedule: str, virtual: int, work: float, slowest: float = 0.0
) -> float:
    """Seconds that a step takes at least, however the state is sharded.

    Args:
        ranks: Of the pipeline.
        microbatches: Of a step.
        schedule: Its name.
        virtual: Stages on a rank.
        work: Seconds of all blocks, forward and backward, for one micro-batch on the ranks of one replica:
            W of the formula.
        slowest: Of these, what the slowest rank has at least, where that is known to be more than its part.
    """
    if ranks == 1:
        return microbatches * work
    left = 3 * ranks * virtual if kind_of(schedule).bubble_fill else virtual
    return (microbatches - 1 / left) * max(slowest, work / ranks) + work / left
