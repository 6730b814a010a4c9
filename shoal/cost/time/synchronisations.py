"""Seconds that ranks wait for one another when they synchronise many times in a step.

Work that takes all ranks the same time on average takes each rank a little more or less: because of
interrupts, other programs, the state of caches. Such delays add up like the steps of a random walk: after t
seconds a rank differs from the mean by a standard deviation of `noise` sqrt(t), where a Cluster's `noise` is
the deviation after one second. Ranks that synchronise n times in T seconds of work, and do nothing else until
the last rank is there, wait

    n m noise sqrt(T / n)  =  m noise sqrt(n T)

seconds, where m is the number of standard deviations by which the last rank is behind the mean. The wait
grows with the number of synchronisations. `jitter` is another thing: the variation of a whole step's pace.
Ranks wait for that once, however often they synchronise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from shoal.cost.time.maximum import normal_maximum


@lru_cache
def behind_the_mean(ranks: int) -> float:
    """Return by how many standard deviations the last of so many ranks is behind their mean."""
    return normal_maximum(ranks, 1.0) - 1.0


def seconds_late(noise: float, work: float, synchronisations: Sequence[tuple[int, int]]) -> float:
    """Return the seconds that a rank waits for others during some work.

    Args:
        noise: The noise of the Cluster; see `shoal.cluster.Cluster`.
        work: Seconds of the work.
        synchronisations: Pairs of how many ranks synchronise and how often, at equal intervals.
    """
    number = sum(times for _, times in synchronisations)
    if not noise or not number:
        return 0.0
    behind = sum(times * behind_the_mean(ranks) for ranks, times in synchronisations)
    return noise * behind * math.sqrt(work / number)
