"""A bound that no step under a Plan is quicker than, in a microsecond: what lets a search skip most Plans.

`shoal.cost.step` takes pace + fill + sends + data + update. With W the seconds of all blocks for a
micro-batch, the slowest of p ranks has at least W / p. So with m micro-batches and v stages on a rank

    pace + fill = m max + (W - max) / v >= (m - 1 / v) W / p + W / v

as m >= 1 / v. Schedules that fill the bubble with weight gradients leave at least (W - max) / (3 p v) of it.
The other parts are at least 0.
"""

from __future__ import annotations

from shoal.planner.space import Variant

__all__ = ["least_seconds"]

_FILL_THE_BUBBLE = ("zb-h1", "zb-v", "dualpipe-v", "search")


def least_seconds(variant: Variant, work: float) -> float:
    """Seconds that a step takes at least, however the model is cut and the state sharded.

    Args:
        variant: The Plan.
        work: Seconds of all blocks, forward and backward, for one micro-batch on the ranks of one replica's
            stage: W of the formula.
    """
    ranks, count = variant.degrees.pp, variant.microbatches
    if ranks == 1:
        return count * work
    left = 3 * ranks * variant.virtual if variant.schedule in _FILL_THE_BUBBLE else variant.virtual
    return (count - 1 / left) * work / ranks + work / left
