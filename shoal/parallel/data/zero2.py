"""ZeRO-2: gradients are sharded too (Rajbhandari et al., "ZeRO", arXiv:1910.02054, stage 2).

As ZeRO-1, but a rank keeps only its shard of the gradients: each bucket's sum is freed as soon as it is
reduced. With several micro-batches in a step, the reduce-scatter is therefore done for each of them.
"""

from __future__ import annotations

from shoal.parallel.data.gradient_sum import GradientSum
from shoal.parallel.data.resident import ResidentWeights
from shoal.parallel.data.strategy import Setup, Strategy

__all__ = ["zero2"]


def zero2(setup: Setup) -> Strategy:
    """Sums of gradients are reduced every micro-batch and freed."""
    return ResidentWeights(setup, finish=GradientSum.give_and_free, sums_stay=False)
