"""The size of the buckets in which gradients are exchanged beside backward.

Small buckets start early and pay the collective's latency often; the last one, which is full only when
backward ends, is never hidden. With n equal buckets, t seconds each, that fill every r = B / n seconds of the
last backward B, the exchange ends `max(r + n t - B, t)` after backward: either the collectives are the
slower and follow one another from the first bucket on, or each is done before the next is full. What runs
beside compute slows it by `contention` of its seconds.
"""

from __future__ import annotations

import math

from shoal.cost.layout import Layout
from shoal.cost.network import Group, collective_seconds
from shoal.cost.step import Costs, StageCost
from shoal.plan import Plan

__all__ = ["best_bucket"]

_SIZES = tuple((1 << 20) << power for power in range(11))  # 1 MiB to 1 GiB
_GRADIENT = 4.0  # bytes of a gradient's element, whereas a Plan counts bytes of the weights that compute


def best_bucket(costs: Costs, plan: Plan, batch: int) -> int:
    """The bytes of `Plan.bucket` that leave least of the exchange exposed; the Plan's own where none counts.

    Args:
        costs: Of the model on the cluster.
        plan: With its micro-batch.
        batch: Samples of a step.
    """
    assert plan.microbatch is not None
    if plan.dp * plan.cp == 1 or plan.shard == "zero3":
        return plan.bucket
    stages = costs.stages(plan, batch // plan.dp // plan.microbatch)
    largest = max(stages, key=lambda stage: stage.parameters.total)
    return min(_SIZES, key=lambda size: _exposed(costs, plan, largest, size))


def _exposed(costs: Costs, plan: Plan, stage: StageCost, size: int) -> float:
    """Seconds after backward, and those by which the exchange slows it."""
    parameters = stage.parameters.total
    buckets = math.ceil(Layout.of(plan).width * parameters / size)
    backward = stage.input + stage.weight
    each = _exchange(costs, plan, _GRADIENT * parameters / buckets)
    after = max(backward / buckets + buckets * each - backward, each)
    return after + costs.cluster.device.contention * buckets * each


def _exchange(costs: Costs, plan: Plan, nbytes: float) -> float:
    """Seconds for the gradients of one bucket."""
    shards = plan.shards * plan.cp if plan.shard != "none" else 1
    seconds = collective_seconds("reduce_scatter", nbytes, Group(shards, plan.tp), costs.cluster)
    replicas = Group(plan.dp * plan.cp // shards, plan.tp * shards)
    return seconds + collective_seconds("all_reduce", nbytes / shards, replicas, costs.cluster)
