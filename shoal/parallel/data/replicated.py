"""Replicated data parallel: every rank holds the whole state, and gradients are all-reduced.

Gradients are summed in buckets, and a bucket's all-reduce runs while backward goes on (Li et al., "PyTorch
Distributed", arXiv:2006.15704). Each rank sends 2 P (d - 1) / d elements a step, however many micro-batches.
"""

from __future__ import annotations

from shoal.parallel.data.gradient_sum import GradientSum
from shoal.parallel.data.resident import ResidentWeights
from shoal.parallel.data.strategy import Setup, Strategy

__all__ = ["replicated"]


def replicated(setup: Setup) -> Strategy:
    """The mesh's `shard` axis has one rank: a bucket is reduced over the replicas alone, and owned whole."""
    return ResidentWeights(setup, finish=GradientSum.give, sums_stay=True)
