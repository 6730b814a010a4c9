"""How much longer a step takes because all ranks wait for the slowest one.

Ranks that do the same work do not take the same time. Where each rank waits once in a step for all others,
the step takes as long as the slowest of n ranks. If F is the distribution of their times, that is on average

    integral of t d F(t)^n

It grows without bound: for normal times by about sqrt(2 ln n) standard deviations, faster for lognormal
times, whose tail is longer. `maximum.py` gives this over the mean of one rank. It integrates over the normal
variable x that the time is a function of:

    integral of time(x) n pdf(x) cdf(x)^(n - 1) dx

In a step, all ranks that make it together wait for one another at the norm of all gradients; after that only
the optimizer is left. A Cluster's `jitter` is the variation of lognormal times. The wait is the resulting
share of all seconds before the norm.

With local updates only the ranks of a worker make a step together. Workers wait for the slowest of them at
merges, once in k = every / fragments steps. What is late in one step is early in another: if a worker's steps
vary by v, its k steps together vary by v / sqrt(k), and that is what workers wait for. Parameter servers with
`staleness=s` let a worker be s steps ahead: v / (1 + s) is what is left then, a little more than in a random
simulation. `quorum`, `grace` and `delay` are taken to save nothing.
"""

from __future__ import annotations

import math

from shoal.cluster import Cluster
from shoal.cost.time.maximum import lognormal_maximum, lognormal_variation
from shoal.plan import Groups, Plan


def straggler_share(plan: Plan, cluster: Cluster) -> float:
    """Return the wait for the slowest rank, as a share of the seconds before ranks meet; a mean step's."""
    if not cluster.jitter:
        return 0.0
    groups, exchange = Groups.of(plan), plan.exchanged
    together = groups.in_step.size
    share = lognormal_maximum(together, cluster.jitter)
    workers = groups.world.size // together
    if workers > 1:
        steps = exchange.every / exchange.fragments if exchange.merges else 1.0
        varies = lognormal_variation(together, cluster.jitter) / math.sqrt(steps) / (1 + exchange.staleness)
        share *= lognormal_maximum(workers, varies)
    return share - 1
