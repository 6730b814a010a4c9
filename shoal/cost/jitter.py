"""How much longer a step takes because all ranks wait for the slowest one.

Ranks that do the same work do not take the same time. Where each meets all others once in a step, the step
takes as long as the longest of n times: with F their distribution, on average

    integral of t d F(t)^n

which grows without bound: for normal times by about sqrt(2 ln n) standard deviations, faster for lognormal
ones, whose tail is longer. Both functions give the factor over the mean of one rank, by integrating over the
normal variable x that the time is a function of:

    integral of time(x) n pdf(x) cdf(x)^(n - 1) dx

In a step all ranks meet at the norm of all gradients, after which each has only the optimizer to do. So with
a Cluster's `jitter`, in lognormal times, they wait for so much of all that comes before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from shoal.cluster import Cluster
from shoal.cost.step import StepCost

__all__ = ["lognormal_maximum", "normal_maximum", "straggler_share", "with_stragglers"]

_REACH = 12.0  # standard deviations; of 10^12 ranks the largest is near 7
_STEPS_PER_DEVIATION = 32  # the trapezoidal rule of so smooth an integrand is exact to rounding


def normal_maximum(ranks: int, variation: float) -> float:
    """The expected longest of the ranks' times over their mean, if times are normal.

    Args:
        ranks: How many wait for each other.
        variation: Standard deviation of a rank's time over its mean.
    """
    return _expected_of_largest(ranks, lambda deviate: 1 + variation * deviate)


def lognormal_maximum(ranks: int, variation: float) -> float:
    """The same if the logarithms of the times are normal: most ranks near the mean, some far above it."""
    squared = math.log1p(variation**2)
    sigma = math.sqrt(squared)
    return _expected_of_largest(ranks, lambda deviate: math.exp(sigma * deviate - squared / 2))


def straggler_share(cluster: Cluster) -> float:
    """How long all ranks of a Cluster wait for the slowest one, over what they do until they meet."""
    return lognormal_maximum(cluster.devices, cluster.jitter) - 1 if cluster.jitter else 0.0


def with_stragglers(cost: StepCost, cluster: Cluster) -> StepCost:
    """A step with the wait for the slowest rank, as the part "straggler"."""
    wait = straggler_share(cluster) * (cost.seconds - cost.parts["optimizer"])
    return replace(cost, seconds=cost.seconds + wait, parts={**cost.parts, "straggler": wait})


def _expected_of_largest(ranks: int, time: Callable[[float], float]) -> float:
    """Of `ranks` independent standard normal variables, the mean of `time` of the largest."""
    total = 0.0
    for index in range(-round(_REACH * _STEPS_PER_DEVIATION), round(_REACH * _STEPS_PER_DEVIATION) + 1):
        deviate = index / _STEPS_PER_DEVIATION
        density = math.exp(-(deviate**2) / 2) / math.sqrt(2 * math.pi)
        above = math.erfc(deviate / math.sqrt(2)) / 2
        others_below = math.exp((ranks - 1) * math.log1p(-above)) if above < 1 else float(ranks == 1)
        total += time(deviate) * ranks * density * others_below
    return total / _STEPS_PER_DEVIATION
