"""Seconds of buckets of gradients and weights when nothing runs beside them, and their load on the device.

Gradients are copied to their bucket in the type of a Plan's `reduce`, and summed over the shards, then over
the replicas. A rank's shard is added in fp32 to its shard from earlier micro-batches. Weights are gathered
over the shards.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from shoal.cluster import Cluster
from shoal.cost.collectives.network import collective_load, collective_seconds
from shoal.cost.time.buckets import Bucket
from shoal.cost.time.passes import stream_seconds
from shoal.plan import Plan

__all__ = [
    "NOTHING",
    "SUM_WIDTH",
    "BucketTimes",
    "bucket_times",
    "copy_seconds",
    "gather_seconds",
    "reduce_seconds",
    "sent_width",
    "together",
]

SUM_WIDTH = 4  # bytes of an element of a sum of gradients on a rank: fp32


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


def sent_width(plan: Plan) -> int:
    """Return the bytes of a gradient that ranks send each other."""
    return 2 if plan.reduce == "bf16" else SUM_WIDTH


def bucket_times(bucket: Bucket, width: int, cluster: Cluster, sent: int = SUM_WIDTH) -> BucketTimes:
    """Return the times of all equal buckets together.

    Args:
        bucket: The bucket.
        width: Bytes of a weight, and of its gradient when backward has made it.
        cluster: The machines.
        sent: Bytes of a gradient that ranks send each other.
    """
    load = collective_load(bucket.family.shards, cluster)
    scatter, reduce = _sums(bucket, cluster, sent)
    gather = gather_seconds(bucket, width, cluster)
    return BucketTimes(
        scatter + reduce,
        load * scatter + collective_load(bucket.family.replicas, cluster) * reduce,
        gather,
        load * gather,
        copy_seconds(bucket, width, cluster, sent),
    )


def together(timed: Iterable[tuple[Bucket, BucketTimes]]) -> BucketTimes:
    """Return the seconds of all buckets, one after another."""
    return BucketTimes(*map(sum, zip(NOTHING, *(times for _, times in timed), strict=True)))


def reduce_seconds(bucket: Bucket, cluster: Cluster, sent: int = SUM_WIDTH) -> float:
    """Return the seconds to sum the gradients of all equal buckets, over shards and then over replicas.

    Each gradient has `sent` bytes on the way.
    """
    return sum(_sums(bucket, cluster, sent))


def gather_seconds(bucket: Bucket, width: int, cluster: Cluster) -> float:
    """Return the seconds to gather the weights, `width` bytes each, of all equal buckets."""
    nbytes = width * bucket.parameters
    return bucket.number * collective_seconds("all_gather", nbytes, bucket.family.shards, cluster)


def copy_seconds(bucket: Bucket, width: int, cluster: Cluster, sent: int = SUM_WIDTH) -> float:
    """Return the seconds of the passes that copy gradients into all equal buckets, and a rank's shard out.

    `width` and `sent` are those of `bucket_times`.
    """
    shards = bucket.family.shards.size
    if shards * bucket.family.replicas.size == 1:
        return 0.0
    nbytes = (width + sent + (sent + 2 * SUM_WIDTH) / shards) * bucket.parameters
    return bucket.number * stream_seconds(cluster.device, nbytes, 2)


def _sums(bucket: Bucket, cluster: Cluster, sent: int) -> tuple[float, float]:
    """Return the seconds to sum gradients over the shards, and over the replicas."""
    family, nbytes = bucket.family, float(sent) * bucket.parameters
    scatter = collective_seconds("reduce_scatter", nbytes, family.shards, cluster)
    owned = nbytes / family.shards.size
    reduce = collective_seconds("all_reduce", owned, family.replicas, cluster)
    return bucket.number * scatter, bucket.number * reduce
