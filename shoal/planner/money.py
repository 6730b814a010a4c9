"""The cheapest Plans: those that spend the least device time on a token, on as few devices as that takes.

On a given number of devices the cheapest Plan is the quickest. Fewer devices are slower, and often cheaper,
since they communicate less; so every number of whole nodes that divides the cluster is searched, and within
a node every number that divides it.
"""

from __future__ import annotations

from shoal.cluster import Cluster
from shoal.errors import ClusterError
from shoal.plan import divisors
from shoal.planner.candidate import Candidate
from shoal.planner.search import Search
from shoal.workload import Workload

__all__ = ["cheapest"]


def cheapest(
    workload: Workload, cluster: Cluster, batch: int, *, margin: float, limit: int
) -> list[Candidate]:
    """The Plans with the least money for a step, best first.

    Args:
        workload: What is trained.
        cluster: The most devices that there are.
        batch: Samples of a step.
        margin: Share of each device's memory that is to stay free.
        limit: How many.

    Raises:
        ClusterError: The Cluster has no price.
    """
    if not cluster.price:
        raise ClusterError(
            f"{cluster.name} has no price",
            possible="a Cluster with the price of a device in dollars an hour",
            change="write its price into a file of the Cluster, or choose by time",
        )
    node, found = cluster.devices_per_node, list[Candidate]()
    for devices in divisors(cluster.devices):
        if devices % node == 0 or node % devices == 0:
            part = cluster.with_devices(devices)
            found += Search(workload, part, batch, margin=margin).best(limit).candidates
    return sorted(found, key=lambda each: each.dollars_per_step)[:limit]
