"""Whether a Plan has room, by how much it has not, and the fewest devices on which a model could train."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from shoal.cluster import Cluster
from shoal.cost.memory.memory import Memories, RankMemory
from shoal.errors import PlanError
from shoal.plan import FULLY_SHARDED, SettledPlan
from shoal.units import format_bytes
from shoal.workload import Workload

__all__ = ["SmallestFit", "smallest_fit", "too_large"]

_MOST_DEVICES = 1 << 20


@dataclass(frozen=True, slots=True)
class SmallestFit:
    """The fewest devices that have room.

    Attributes:
        devices: How many.
        plan: One that fits them.
        memory: Of its fullest rank.
    """

    devices: int
    plan: SettledPlan
    memory: RankMemory


def too_large(memory: RankMemory, cluster: Cluster, margin: float = 0.0) -> str:
    """One sentence on a rank that does not fit: by how much, and which part is largest.

    Args:
        memory: Of the rank.
        cluster: Whose devices it does not fit.
        margin: Share of a device's memory that is to be left free.
    """
    limit = cluster.device.memory * (1 - margin)
    left = f" with {margin:.0%} left free" if margin else ""
    return (
        f"rank {memory.rank} of the pipeline needs {_gib(memory.peak)} at its peak ({memory.moment}), "
        f"{_gib(memory.peak - limit)} more than the {_gib(limit)} of {cluster.device.name}{left}; "
        f"the largest part is {memory.largest}, {_gib(memory.parts[memory.largest])}"
    )


def smallest_fit(workload: Workload, cluster: Cluster, batch: int, margin: float = 0.0) -> SmallestFit | None:
    """The fewest devices at which some Plan has room, under the most frugal settings.

    These are zero3 over all data-parallel ranks, recompute=full, a sample in a micro-batch, 16 bit where the
    device has it; tensor parallelism up to a node, and any stages, parts of the sequence and experts that
    divide the devices and the model. Tried are powers of two up to a node, then whole nodes, their number
    doubled until it is enough and then bisected.

    Args:
        workload: What is trained.
        cluster: Its devices and nodes; how many there are does not matter.
        batch: Samples of a step.
        margin: Share of a device's memory that is to be left free.

    Returns:
        None if no number of devices is enough.
    """
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
    """The frugal Plan that needs least of so many devices, if it fits them."""
    best: SmallestFit | None = None
    for plan in _frugal_plans(memories.workload, cluster, devices, batch):
        try:
            memory = memories.fullest(plan, batch)
        except PlanError:  # the batch, or the model, does not divide so
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
    """The powers of two that divide a number."""
    return [1 << power for power in range((number & -number).bit_length())]


def _gib(nbytes: float) -> str:
    return format_bytes(round(nbytes))
