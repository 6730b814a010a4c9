"""ZeRO-1: the optimizer's state is sharded (Rajbhandari et al., "ZeRO", arXiv:1910.02054, stage 1).

The pair of communications: gradients are reduce-scattered in backward, so that each rank has the sum of its
shard, and after the optimizer's step weights are all-gathered, in the next forward. Each rank sends
2 P (d - 1) / d elements a step, as an all-reduce does. Hybrid: the shard's sums are then all-reduced over the
replicas.
"""

from __future__ import annotations

from shoal.parallel.data.gradient_sum import GradientSum
from shoal.parallel.data.resident import ResidentWeights
from shoal.parallel.data.strategy import Setup, Strategy

__all__ = ["zero1"]


def zero1(setup: Setup) -> Strategy:
    """Sums of gradients stay whole on every rank, and are reduced once a step."""
    return ResidentWeights(setup, finish=GradientSum.give, sums_stay=True)
