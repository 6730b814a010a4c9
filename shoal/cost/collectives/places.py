"""Which links join the ranks of two places along a pipeline, by where each pair of them really sits.

Ranks fill the groups of each level in order: rank r is in group r // devices of a level. Two ranks that are
`d` apart are in one group or in two, as they lie; of all pairs the farthest decides how long a message takes.
"""

from __future__ import annotations

from functools import lru_cache

from shoal.cluster import Cluster, Level
from shoal.plan import Boundary

__all__ = ["joining_level", "message_seconds"]


@lru_cache(maxsize=1 << 14)
def joining_level(boundary: Boundary, cluster: Cluster) -> Level:
    """Return the links that the farthest pair of ranks needs."""
    for level in cluster.levels[:-1]:
        if not boundary.crosses(level.devices):
            return level
    return cluster.levels[-1]


def message_seconds(nbytes: float, boundary: Boundary, cluster: Cluster) -> float:
    """Return the seconds of a message over the links that the farthest pair of ranks needs.

    Over rails, bytes for a device at another place of its node pass the links in the sender's node first.
    """
    level, inside = joining_level(boundary, cluster), cluster.levels[0]
    seconds = inside.setup + level.latency + nbytes / level.rate(2)
    if level.rails and boundary.distance % inside.devices:
        seconds += inside.latency + nbytes / inside.rate(2)
    return seconds
