"""How much longer a step takes because all ranks wait for the slowest one.

Ranks that do the same work do not take the same time. Where each rank waits once in a step for all others,
the step takes as long as the slowest of n ranks. If F is the distribution of their times, that is on average

    integral of t d F(t)^n

It grows without bound: for normal times by about sqrt(2 ln n) standard deviations, faster for lognormal
times, whose tail is longer. The functions give this over the mean of one rank. They integrate over the
normal variable x that the time is a function of:

    integral of time(x) n pdf(x) cdf(x)^(n - 1) dx

In a step, all ranks that make it together wait for one another at the norm of all gradients; after that only
the optimizer is left. A Cluster's `jitter` is the variation of lognormal times. The wait is the resulting
share of all seconds before the norm.

With local updates only the ranks of a worker make a step together. Workers wait for the slowest of them at
merges, once in k = every / fragments steps. What is late in one step is early in another: if a worker's steps
vary by v, its k steps together vary by v / sqrt(k), and that is what workers wait for. Parameter servers with
`staleness=s` let a worker be s steps ahead: v / (1 + s) is what is left then, a little more than in a random
simulation. `quorum`, `grace` and `delay` are taken to save nothing.

The expected longest
--------------------

The expected longest of several ranks' times, over the mean of one.

For n ranks whose times have the distribution F and the density f, it is the integral of
t n f(t) F(t)^(n - 1) dt. It grows without bound with n: for normal times by about sqrt(2 ln n) standard
deviations, faster for lognormal times, whose tail is longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

from shoal.spec.cluster import Cluster
from shoal.spec.plan import Groups, Plan

_REACH = 12.0  # standard deviations; the largest of 10^12 ranks is near 7
_STEPS_PER_DEVIATION = 32  # for such a smooth integrand the trapezoidal rule is exact up to rounding


def normal_maximum(ranks: int, variation: float) -> float:
    """Return the expected longest of the ranks' times over their mean, if times are normal.

    Args:
        ranks: Number of ranks that wait for each other.
        variation: Standard deviation of a rank's time over its mean.
    """
    return _expected_of_largest(ranks, lambda deviate: 1 + variation * deviate)


def lognormal_maximum(ranks: int, variation: float) -> float:
    """Return the same factor for lognormal times: most ranks near the mean, some far above it."""
    return _lognormal_moment(ranks, variation, 1)


def lognormal_variation(ranks: int, variation: float) -> float:
    """Return the standard deviation of the longest of the ranks' lognormal times, over the mean of that."""
    squared = _lognormal_moment(ranks, variation, 2) / _lognormal_moment(ranks, variation, 1) ** 2
    return math.sqrt(max(0.0, squared - 1))


@lru_cache(maxsize=1 << 10)
def _lognormal_moment(ranks: int, variation: float, power: int) -> float:
    """Return the mean of a power of the longest of the ranks' times, where the mean of one rank's is 1."""
    squared = math.log1p(variation**2)
    sigma = math.sqrt(squared)
    return _expected_of_largest(ranks, lambda deviate: math.exp(power * (sigma * deviate - squared / 2)))


def _expected_of_largest(ranks: int, time: Callable[[float], float]) -> float:
    """Return the mean of `time` at the largest of `ranks` independent standard normal variables."""
    total = 0.0
    for index in range(-round(_REACH * _STEPS_PER_DEVIATION), round(_REACH * _STEPS_PER_DEVIATION) + 1):
        deviate = index / _STEPS_PER_DEVIATION
        density = math.exp(-(deviate**2) / 2) / math.sqrt(2 * math.pi)
        above = math.erfc(deviate / math.sqrt(2)) / 2
        others_below = math.exp((ranks - 1) * math.log1p(-above)) if above < 1 else float(ranks == 1)
        total += time(deviate) * ranks * density * others_below
    return total / _STEPS_PER_DEVIATION


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
