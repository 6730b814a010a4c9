"""Seconds of operations, blocks and buckets, and a lower bound on those of a step."""

from shoal.cost.time.attention import attention_seconds
from shoal.cost.time.block import BlockCost, block_cost
from shoal.cost.time.bucket_times import copy_seconds, gather_seconds, reduce_seconds
from shoal.cost.time.buckets import (
    Bucket,
    Family,
    buckets_of,
    families_of,
    families_over,
    parameters_on_rank,
)
from shoal.cost.time.crowding import crowded_seconds
from shoal.cost.time.data_parallel import StageWork
from shoal.cost.time.host import starts_of
from shoal.cost.time.hosts import settled_compile
from shoal.cost.time.jitter import straggler_share
from shoal.cost.time.joins import Join, Joined
from shoal.cost.time.losses import compute_parts
from shoal.cost.time.maximum import lognormal_maximum, normal_maximum
from shoal.cost.time.offload import update_outside
from shoal.cost.time.passes import pass_seconds, stream_seconds
from shoal.cost.time.products import depth_of, product_seconds
from shoal.cost.time.served import ServedTimes, served_times
from shoal.cost.time.suited import workload_on
from shoal.cost.time.synchronisations import behind_the_mean
from shoal.cost.time.wire import Sum, Wire, payload_bytes

__all__ = [
    "BlockCost",
    "Bucket",
    "Family",
    "Join",
    "Joined",
    "ServedTimes",
    "StageWork",
    "Sum",
    "Wire",
    "attention_seconds",
    "behind_the_mean",
    "block_cost",
    "buckets_of",
    "compute_parts",
    "copy_seconds",
    "crowded_seconds",
    "depth_of",
    "families_of",
    "families_over",
    "gather_seconds",
    "lognormal_maximum",
    "normal_maximum",
    "parameters_on_rank",
    "pass_seconds",
    "payload_bytes",
    "product_seconds",
    "reduce_seconds",
    "served_times",
    "settled_compile",
    "starts_of",
    "straggler_share",
    "stream_seconds",
    "update_outside",
    "workload_on",
]
