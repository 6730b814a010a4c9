"""Seconds of operations, blocks and buckets, and a lower bound on those of a step."""

from shoal.predict.cost.time.block import BlockCost, Join, Joined, behind_the_mean, block_cost
from shoal.predict.cost.time.buckets import (
    Bucket,
    Family,
    Sum,
    Wire,
    buckets_of,
    copy_seconds,
    families_of,
    families_over,
    gather_seconds,
    parameters_on_rank,
    payload_bytes,
    reduce_seconds,
)
from shoal.predict.cost.time.compute import (
    attention_seconds,
    depth_of,
    pass_seconds,
    product_seconds,
    starts_of,
    stream_seconds,
)
from shoal.predict.cost.time.data_parallel import StageWork
from shoal.predict.cost.time.hosts import settled_compile
from shoal.predict.cost.time.jitter import lognormal_maximum, normal_maximum, straggler_share
from shoal.predict.cost.time.merges import ServedTimes, served_times
from shoal.predict.cost.time.offload import update_outside
from shoal.predict.cost.time.step import compute_parts, crowded_seconds, workload_on

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
