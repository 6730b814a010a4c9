"""Seconds that buckets of gradients and weights take by themselves, and how they load the device meanwhile.

Gradients are copied in fp32 to their bucket, summed over the shards and then over the replicas, and a rank's
shard is added to that of the micro-batches before; weights are gathered over the shards.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from shoal.cluster import Cluster
from shoal.cost.collectives.network import collective_load, collective_seconds
from shoal.cost.time.buckets import Bucket
from shoal.cost.time.compute import stream_seconds

__all__ = [
    "NOTHING",
    "SUM_WIDTH",
    "BucketTimes",
    "bucket_times",
    "copy_seconds",
    "gather_seconds",
    "reduce_seconds",
    "together",
]

SUM_WIDTH = 4  # bytes of an element of a sum of gradients: fp32


class BucketTimes(NamedTuple):
    """Seconds of buckets.

    Attributes:
        reduce: Of their gradients' sums.
        reduce_loaded: Of these, times how much they load the device (`network.collective_load`).
        gather: Of their weights.
        gather_loaded: As above.
        copy: Of the passes that take gradients into them, and a rank's shard out of them.
    """

    reduce: float
    reduce_loaded: float
    gather: float
    gather_loaded: float
    copy: float


NOTHING = BucketTimes(0.0, 0.0, 0.0, 0.0, 0.0)
"""Of no bucket."""


def bucket_times(bucket: Bucket, width: int, cluster: Cluster) -> BucketTimes:
    """Times of all equal buckets together, with so many bytes of each weight and gradient."""
    load = collective_load(bucket.family.shards, cluster)
    scatter, reduce = _sums(bucket, cluster)
    gather = gather_seconds(bucket, width, cluster)
    return BucketTimes(
        scatter + reduce,
        load * scatter + collective_load(bucket.family.replicas, cluster) * reduce,
        gather,
        load * gather,
        copy_seconds(bucket, width, cluster),
    )


def together(timed: Iterable[tuple[Bucket, BucketTimes]]) -> BucketTimes:
    """Seconds of all buckets, one after another."""
    return BucketTimes(*map(sum, zip(NOTHING, *(times for _, times in timed), strict=True)))


def reduce_seconds(bucket: Bucket, cluster: Cluster) -> float:
    """Seconds of all equal buckets' gradients, over the shards and then over the replicas."""
    return sum(_sums(bucket, cluster))


def gather_seconds(bucket: Bucket, width: int, cluster: Cluster) -> float:
    """Seconds of all equal buckets' weights, of so many bytes each, over the shards."""
    nbytes = width * bucket.parameters
    return bucket.number * collective_seconds("all_gather", nbytes, bucket.family.shards, cluster)


def copy_seconds(bucket: Bucket, width: int, cluster: Cluster) -> float:
    """Seconds of the passes that copy gradients into a bucket, and this rank's shard out of it.

    Of all equal buckets together.
    """
    shards = bucket.family.shards.size
    if shards * bucket.family.replicas.size == 1:
        return 0.0
    nbytes = (width + SUM_WIDTH + 3 * SUM_WIDTH / shards) * bucket.parameters
    return bucket.number * stream_seconds(cluster.device, nbytes, 2)


def _sums(bucket: Bucket, cluster: Cluster) -> tuple[float, float]:
    """Over the shards, and over the replicas."""
    family, nbytes = bucket.family, float(SUM_WIDTH) * bucket.parameters
    scatter = collective_seconds("reduce_scatter", nbytes, family.shards, cluster)
    owned = nbytes / family.shards.size
    reduce = collective_seconds("all_reduce", owned, family.replicas, cluster)
    return bucket.number * scatter, bucket.number * reduce
