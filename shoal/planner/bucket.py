"""The size of the buckets in which gradients are communicated beside backward.

Small buckets start early, but pay the collective's latency often. The last bucket, which is full only when
backward ends, is never hidden. `usual_bucket` looks only at the links; a search plays the sizes that may be
quickest.
"""

from __future__ import annotations

from shoal.cluster import Cluster
from shoal.cost import Layout
from shoal.cost.time import Bucket, families_of, gather_seconds, reduce_seconds
from shoal.plan import SettledPlan

SIZES = (16 << 20, 128 << 20, 1 << 30)
"""Sizes that a search tries; the best Plans get more."""

ALL_SIZES = tuple((1 << 20) << power for power in range(11))
"""Sizes that the best Plans are tried with: 1 MiB to 1 GiB."""
_NEAR = 1.25  # a byte may take this many times as long as in the largest bucket


def usual_bucket(cluster: Cluster, plan: SettledPlan) -> int:
    """Return the smallest size whose time per byte is nearly that of the largest size.

    Args:
        cluster: The machines that it runs on.
        plan: A Plan with a fixed micro-batch; it says which ranks communicate, and how.
    """
    if plan.dp * plan.cp == 1 or plan.sharding.cuts_weights:
        return plan.bucket
    family, width = families_of(plan)[0], Layout.of(plan).width

    def seconds_of_a_byte(size: int) -> float:
        bucket = Bucket(size / width, 0, 0, family)
        return (reduce_seconds(bucket, cluster) + gather_seconds(bucket, width, cluster)) / size

    limit = _NEAR * seconds_of_a_byte(ALL_SIZES[-1])
    return next(size for size in ALL_SIZES if seconds_of_a_byte(size) <= limit)
