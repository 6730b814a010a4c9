"""Says why a Plan does not fit in memory, and finds the smallest cluster on which a model could train."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from shoal.errors import PlanError
from shoal.predict.cost.device_kinds import views_of
from shoal.predict.cost.memory.memory import Memories, RankMemory
from shoal.spec.cluster import Cluster
from shoal.spec.plan import FULLY_SHARDED, SettledPlan
from shoal.spec.workload import Workload
from shoal.units import format_bytes

_MOST_DEVICES = 1 << 20


@dataclass(frozen=True, slots=True)
class SmallestFit:
    """The fewest devices on which a model fits.

    Attributes:
        devices: Number of devices.
        plan: A Plan that fits on them.
        memory: Memory of its fullest rank.
    """

    devices: int
    plan: SettledPlan
    memory: RankMemory


def too_large(memory: RankMemory, cluster: Cluster, margin: float = 0.0) -> str:
    """Return a sentence that says how far a rank exceeds its device's memory, and its largest part.

    Args:
        memory: Memory of the rank.
        cluster: The Cluster with the devices that it does not fit.
        margin: Share of a device's memory that stays free.
    """
    limit = cluster.device.memory / memory.tightness * (1 - margin)
    name = cluster.device.name if memory.tightness == 1 else "the smallest of its devices"
    left = f" with {margin:.0%} left free" if margin else ""
    return (
        f"rank {memory.rank} of the pipeline needs {_gib(memory.peak)} at its peak ({memory.moment}), "
        f"{_gib(memory.peak - limit)} more than the {_gib(limit)} of {name}{left}; "
        f"the largest part is {memory.largest}, {_gib(memory.parts[memory.largest])}"
    )


def smallest_fit(workload: Workload, cluster: Cluster, batch: int, margin: float = 0.0) -> SmallestFit | None:
    """Return the fewest devices on which some Plan fits, under the settings that need least memory.

    These settings are zero3 over all data-parallel ranks, recompute=full, one sample in a micro-batch and 16
    bit where the device has it. Tensor parallelism goes up to a node; pipeline, context and expert
    parallelism may divide the devices and the model in any way. The search tries powers of two up to a node,
    then whole nodes: it doubles their number until the model fits, then bisects.

    Args:
        workload: The work of the model that is trained.
        cluster: The kind of devices and nodes; their number does not matter. Where devices differ, those of
            its first part count.
        batch: Samples of a step.
        margin: Share of a device's memory that stays free.

    Returns:
        None if no number of devices is enough.
    """
    cluster = views_of(cluster)[0]
    memories = Memories(workload, cluster)

    def at(devices: int) -> SmallestFit | None:
        return _leanest(memories, cluster, devices, batch, margin)

    node = cluster.devices_per_node
    devices = 1
    while (found := at(devices)) is None:
        devices = devices * 2 if devices * 2 <= node or devices % node == 0 else node
        if devices > _MOST_DEVICES:
            return None
    low, high = devices // 2 // node, devices // node
    while high - low > 1:
        middle = (low + high) // 2
        between = at(middle * node)
        if between is None:
            low = middle
        else:
            high, found = middle, between
    return found


def _leanest(
    memories: Memories, cluster: Cluster, devices: int, batch: int, margin: float
) -> SmallestFit | None:
    """Return the frugal Plan that needs least memory on so many devices, or None if it does not fit."""
    best: SmallestFit | None = None
    for plan in _frugal_plans(memories.workload, cluster, devices, batch):
        try:
            memory = memories.fullest(plan, batch)
        except PlanError:  # the batch or the model cannot be divided like this
            continue
        if best is None or memory.peak < best.memory.peak:
            best = SmallestFit(devices, plan, memory)
    return best if best is not None and best.memory.fits(cluster, margin) else None


def _frugal_plans(workload: Workload, cluster: Cluster, devices: int, batch: int) -> Iterator[SettledPlan]:
    precision = "bf16" if "bf16" in cluster.device.peak else "fp32"
    stages = [pp for pp in range(1, len(workload.layers) + 1) if devices % pp == 0]
    for tp in _powers(math.gcd(devices, workload.kv_heads, cluster.devices_per_node)):
        for cp in _powers(math.gcd(devices, workload.length)):
            for pp in stages:
                if devices % (tp * pp * cp):
                    continue
                dp = devices // (tp * pp * cp)
                if batch % dp:
                    continue
                yield SettledPlan(
                    dp=dp,
                    tp=tp,
                    pp=pp,
                    cp=cp,
                    ep=math.gcd(dp * cp, workload.experts) if workload.experts else 1,
                    shard=FULLY_SHARDED.name,
                    microbatch=1,
                    recompute="full",
                    precision=precision,
                    split="count",
                )


def _powers(number: int) -> list[int]:
    """Return the powers of two that divide a number."""
    return [1 << power for power in range((number & -number).bit_length())]


def _gib(nbytes: float) -> str:
    return format_bytes(round(nbytes))
