"""Which links join the ranks of two places along a pipeline, by where each pair of them really sits.

Ranks fill the groups of each level in order: rank r is in group r // devices of a level. Two ranks that are
`d` apart are in one group or in two, as they lie; of all pairs the farthest decides how long a message takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from shoal.cluster import Cluster, Level
from shoal.cost.layout import Layout
from shoal.plan import Boundary, Group
from shoal.workload import Workload


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
    (level, is_displaced), inside = _way_of(boundary, cluster), cluster.levels[0]
    seconds = inside.setup + level.latency + nbytes / level.rate(2)
    if is_displaced:
        seconds += inside.latency + nbytes / inside.rate(2)
    return seconds


def alike_boundaries(
    pp: Group, stage: Group, placement: Sequence[int], cluster: Cluster
) -> tuple[Boundary | None, ...]:
    """Return, for each stage but the last, a boundary whose messages take as long as those to the next stage.

    Args:
        pp: The ranks along the pipeline.
        stage: The ranks of one stage.
        placement: The place of each stage along the pipeline. Where two stages are at one place, the result
            has None.
        cluster: The machines.
    """
    alike: dict[tuple[Level, bool], Boundary] = {}
    found: dict[tuple[int, int], Boundary | None] = {}
    pairs = list(pairwise(placement))
    for pair in set(pairs):
        boundary = Boundary.between(pp, stage, *pair)
        found[pair] = None if pair[0] == pair[1] else alike.setdefault(_way_of(boundary, cluster), boundary)
    return tuple([found[pair] for pair in pairs])


def _way_of(boundary: Boundary, cluster: Cluster) -> tuple[Level, bool]:
    """Return the links that join the ranks, and whether bytes pass those in the sender's node before."""
    level = joining_level(boundary, cluster)
    return level, level.rails and boundary.distance % cluster.levels[0].devices > 0


def message_bytes(layout: Layout, workload: Workload) -> float:
    """Return the bytes of hidden state that one rank sends to the next stage for a micro-batch."""
    nbytes = float(layout.width) * layout.microbatch * workload.length / layout.cp * workload.hidden
    return nbytes if layout.tensor == "plain" else nbytes / layout.tp
