"""Which links join ranks, by where each of them really sits.

Ranks fill the groups of each level in order: rank r is in group r // devices of a level. Two ranks that are
`d` apart are in one group or in two, as they lie; of many such pairs the farthest decides how long all take.
"""

from __future__ import annotations

from functools import lru_cache

from shoal.cluster import Cluster, Level

__all__ = ["joining_level", "message_seconds"]


@lru_cache(maxsize=1 << 14)
def joining_level(sender: int, receiver: int, pairs: int, cluster: Cluster) -> Level:
    """Return the links that the farthest of some pairs of ranks need.

    Args:
        sender, receiver: The first pair, as global ranks.
        pairs: Number of pairs; each next one has the next ranks.
        cluster: The machines.
    """
    low, apart = min(sender, receiver), abs(receiver - sender)
    for level in cluster.levels:
        if low % level.devices + pairs - 1 + apart < level.devices:
            return level
    return cluster.levels[-1]


def message_seconds(nbytes: float, level: Level, cluster: Cluster) -> float:
    """Return the seconds of a message between two ranks over these links."""
    return cluster.levels[0].setup + level.latency + nbytes / level.rate(2)
