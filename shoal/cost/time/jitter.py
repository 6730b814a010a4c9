"""How much longer a step takes because all ranks wait for the slowest one.

Ranks that do the same work do not take the same time. Where each rank waits once in a step for all others,
the step takes as long as the slowest of n ranks. If F is the distribution of their times, that is on average

    integral of t d F(t)^n

It grows without bound: for normal times by about sqrt(2 ln n) standard deviations, faster for lognormal
times, whose tail is longer. Both functions of `maximum.py` give this over the mean of one rank. They
integrate over the normal variable x that the time is a function of:

    integral of time(x) n pdf(x) cdf(x)^(n - 1) dx

In a step, all ranks wait for one another at the norm of all gradients; after that only the optimizer is left.
A Cluster's `jitter` is the variation of lognormal times. The wait is the resulting share of all seconds
before the norm.
"""

from __future__ import annotations

from shoal.cluster import Cluster
from shoal.cost.time.maximum import lognormal_maximum

__all__ = ["straggler_share"]


def straggler_share(cluster: Cluster) -> float:
    """Return the wait for the slowest rank, as a share of the seconds before all ranks meet."""
    return lognormal_maximum(cluster.devices, cluster.jitter) - 1 if cluster.jitter else 0.0
