"""Seconds of buckets of gradients and weights when nothing runs beside them, and their load on the device.

Gradients are copied to their bucket in the type of a Plan's `reduce`, and summed over the shards, then over
the replicas. A rank's shard is added in fp32 to its shard from earlier micro-batches. Weights are gathered
over the shards.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.cluster import Cluster
from shoal.cost.collectives.network import collective_load, collective_seconds
from shoal.cost.time.buckets import Bucket
from shoal.cost.time.passes import stream_seconds
from shoal.cost.time.wire import SUM_WIDTH, WHOLE, Sum, Wire


class BucketTimes(NamedTuple):
    """Seconds of buckets.

    Attributes:
        reduce: Seconds to sum their gradients.
        reduce_loaded: `reduce` times its load on the device (`network.collective_load`).
        gather: Seconds to gather their weights.
        gather_loaded: `gather` times its load on the device.
        copy: Seconds of the passes that copy gradients into them, and a rank's shard out of them.
    """

    reduce: float
    reduce_loaded: float
    gather: float
    gather_loaded: float
    copy: float


NOTHING = BucketTimes(0.0, 0.0, 0.0, 0.0, 0.0)
"""Times of no bucket."""


def bucket_times(bucket: Bucket, width: int, cluster: Cluster, wire: Wire = WHOLE) -> BucketTimes:
    """Return the times of all equal buckets together.

    Args:
        bucket: The bucket.
        width: Bytes of a weight, and of its gradient when backward has made it.
        cluster: The machines.
        wire: What ranks send each other of gradients.
    """
    load = collective_load(bucket.family.shards, cluster)
    sums = _sums(bucket, cluster, wire)
    gather = gather_seconds(bucket, width, cluster)
    return BucketTimes(
        bucket.number * sum(each.seconds for each in sums),
        bucket.number * sum(collective_load(each.group, cluster) * each.seconds for each in sums),
        gather,
        load * gather,
        copy_seconds(bucket, width, cluster, wire),
    )


def reduce_seconds(bucket: Bucket, cluster: Cluster, wire: Wire = WHOLE) -> float:
    """Return the seconds to sum the gradients of all equal buckets, over shards and then over replicas."""
    return bucket.number * sum(each.seconds for each in _sums(bucket, cluster, wire))


def gather_seconds(bucket: Bucket, width: int, cluster: Cluster) -> float:
    """Return the seconds to gather the weights, `width` bytes each, of all equal buckets."""
    nbytes = width * (bucket.parameters + bucket.frozen)
    return bucket.number * collective_seconds("all_gather", nbytes, bucket.family.shards, cluster)


def copy_seconds(bucket: Bucket, width: int, cluster: Cluster, wire: Wire = WHOLE) -> float:
    """Return the seconds of the passes that copy gradients into all equal buckets, and a rank's shard out.

    `width` and `wire` are those of `bucket_times`.
    """
    shards = bucket.family.shards.size
    if shards * bucket.family.replicas.size == 1:
        return 0.0
    sent = wire.width
    nbytes = (width + sent + (sent + 2 * SUM_WIDTH) / shards) * bucket.parameters
    return bucket.number * stream_seconds(cluster.device, nbytes, 2)


def _sums(bucket: Bucket, cluster: Cluster, wire: Wire) -> list[Sum]:
    """Return the collectives that sum one bucket's gradients; none if all its parameters are frozen."""
    if not bucket.parameters and bucket.frozen:
        return []
    family = bucket.family
    return wire.sums(bucket.parameters, family.shards, family.replicas, cluster)
