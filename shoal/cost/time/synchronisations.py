"""How long ranks wait for one another where they meet many times in a step.

Work that takes all ranks the same time on average takes each a little more or less: interrupts, other
programs, what caches hold. Such delays add up as the steps of a random walk do, so that after t seconds a
rank is off the mean by a standard deviation of `noise` sqrt(t), a Cluster's `noise` being that after one
second. Ranks that meet n times in T seconds of work, each time at once and with nothing else to do until the
last is there, so wait

    n m noise sqrt(T / n)  =  m noise sqrt(n T)

where m is by how many standard deviations the last of them is behind the mean. It grows with the number of
synchronisations, whereas `jitter` is what a whole step's pace differs by: ranks wait for that once, however
often they meet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from shoal.cost.time.maximum import normal_maximum

__all__ = ["behind_the_mean", "seconds_late"]


@lru_cache
def behind_the_mean(ranks: int) -> float:
    """By how many standard deviations the last of so many ranks is behind their mean."""
    return normal_maximum(ranks, 1.0) - 1.0


def seconds_late(noise: float, work: float, synchronisations: Sequence[tuple[int, int]]) -> float:
    """How long a rank waits for others in a piece of work.

    Args:
        noise: See `shoal.cluster.Cluster`.
        work: Seconds of the work.
        synchronisations: How many ranks meet, and how often they do, at equal distances.
    """
    number = sum(times for _, times in synchronisations)
    if not noise or not number:
        return 0.0
    behind = sum(times * behind_the_mean(ranks) for ranks, times in synchronisations)
    return noise * behind * math.sqrt(work / number)
