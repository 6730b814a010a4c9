"""How much longer a step takes because all ranks wait for the slowest one.

Ranks that do the same work do not take the same time. Where each meets all others once in a step, the step
takes as long as the longest of n times: with F their distribution, on average

    integral of t d F(t)^n

which grows without bound: for normal times by about sqrt(2 ln n) standard deviations, faster for lognormal
ones, whose tail is longer. Both functions of `maximum.py` give the factor over the mean of one rank, by
integrating over the normal variable x that the time is a function of:

    integral of time(x) n pdf(x) cdf(x)^(n - 1) dx

In a step all ranks meet at the norm of all gradients, after which each has only the optimizer to do. So with
a Cluster's `jitter`, in lognormal times, they wait for so much of all that comes before.
"""

from __future__ import annotations

from dataclasses import replace

from shoal.cluster import Cluster
from shoal.cost.time.maximum import lognormal_maximum
from shoal.cost.time.step import StepCost

__all__ = ["straggler_share", "with_stragglers"]


def straggler_share(cluster: Cluster) -> float:
    """How long all ranks of a Cluster wait for the slowest one, over what they do until they meet."""
    return lognormal_maximum(cluster.devices, cluster.jitter) - 1 if cluster.jitter else 0.0


def with_stragglers(cost: StepCost, cluster: Cluster) -> StepCost:
    """A step with the wait for the slowest rank, which counts with the part "straggler"."""
    wait = straggler_share(cluster) * (cost.seconds - cost.parts["optimizer"])
    parts = {**cost.parts, "straggler": cost.parts["straggler"] + wait}
    return replace(cost, seconds=cost.seconds + wait, parts=parts)
