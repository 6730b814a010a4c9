"""The cheapest Plans: they use the least device time per token, on the number of devices where that is least.

On a given number of devices the cheapest Plan is the quickest. Fewer devices are slower, and often cheaper,
since they communicate less. So every number of whole nodes that divides the cluster is searched, and within a
node every number that divides it.
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
    """Return the Plans with the lowest cost of a step, cheapest first.

    Args:
        workload: The training.
        cluster: The largest machine that may be used.
        batch: Samples of a step.
        margin: Share of each device's memory that must stay free.
        limit: Number of Plans to return.

    Raises:
        ClusterError: The Cluster has no price.
    """
    if not cluster.price:
        raise ClusterError(
            f"{cluster.name} has no price",
            possible="a Cluster with the price of a device in dollars per hour",
            change="write its price into a file of the Cluster, or choose by time",
        )
    node, found = cluster.devices_per_node, list[Candidate]()
    for devices in divisors(cluster.devices):
        if devices % node == 0 or node % devices == 0:
            part = cluster.with_devices(devices)
            found += Search(workload, part, batch, margin=margin).best(limit).candidates
    return sorted(found, key=lambda each: each.dollars_per_step)[:limit]
