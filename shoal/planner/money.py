"""The number of devices on which the quickest Plan is the cheapest: it uses least device time per token.

On a given number of devices the cheapest Plan is the quickest. Fewer devices are slower, and often cheaper,
since they communicate less. So every number of whole nodes that divides the cluster is searched, and within a
node every number that divides it.
"""

from __future__ import annotations

import math

from shoal.cluster import Cluster
from shoal.errors import ClusterError
from shoal.plan import divisors
from shoal.planner.search import Search
from shoal.workload import Workload


def cheapest(
    workload: Workload, cluster: Cluster, batch: int, *, margin: float, precision: str | None = None
) -> Search:
    """Return the search on as many devices as train a token for the least money.

    Args:
        workload: The training.
        cluster: The largest machine that may be used.
        batch: Samples of a step.
        margin: Share of each device's memory that must stay free.
        precision: The precision of all Plans; see `Search`.

    Raises:
        ClusterError: The Cluster has no price.
    """
    if not cluster.price:
        raise ClusterError(
            f"{cluster.name} has no price",
            possible="a Cluster with the price of a device in dollars per hour",
            change="write its price into a file of the Cluster, or choose by time",
        )
    node, best = cluster.devices_per_node, math.inf
    found = Search(workload, cluster, batch, margin=margin, precision=precision)
    for devices in divisors(cluster.devices):
        if devices % node == 0 or node % devices == 0:
            part = cluster.with_devices(devices)
            search = Search(workload, part, batch, margin=margin, precision=precision)
            first = search.best(1).best
            if first is not None and first.dollars_per_step < best:
                found, best = search, first.dollars_per_step
    return found
