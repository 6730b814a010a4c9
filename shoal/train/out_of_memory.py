"""What to say when a step runs out of memory: what was largest, and which Plan would fit."""

from __future__ import annotations

from dataclasses import replace

import torch

from shoal.errors import PlanError, UserError
from shoal.predict.cost import Memories
from shoal.predict.planner import choose
from shoal.spec.cluster import Cluster, Device
from shoal.spec.plan import SettledPlan
from shoal.train.auto_plan import machines_and_work
from shoal.train.config import TrainConfig
from shoal.units import format_bytes

_LESS = 0.8  # share of what was predicted for the Plan that failed, below which another one is proposed
_OF_CPU = ("can't allocate memory", "not enough memory")  # in messages of torch's allocator


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error says that memory could not be allocated."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OF_CPU)


def does_not_fit(
    config: TrainConfig,
    plan: SettledPlan,
    cluster: Cluster | None,
    rank: int,
    step: int,
    error: Exception,
) -> PlanError:
    """Return the error for a step that ran out of memory.

    Args:
        config: The configuration.
        plan: The Plan that did not fit.
        cluster: The machines; None for this host.
        rank: The rank that ran out of memory.
        step: The step, from 1.
        error: What the allocator said.
    """
    why = str(error).partition("\n")[0] or "no memory is left"
    given = f"step {step} does not fit in the memory of rank {rank}, under {plan}: {why}"
    change = "choose a Plan that needs less"
    try:
        machines, _, workload = machines_and_work(config, plan.ranks, cluster)
        memories = Memories(workload, machines)
        fullest = memories.fullest(plan, config.batch)
        largest, needed = fullest.largest, fullest.peak
        part = f"{largest}, {_size(fullest.parts[largest])} of {_size(needed)}"
        given += f"; the largest part is {part} as predicted"

        def smaller(device: Device) -> Device:
            return replace(device, memory=min(device.memory, _LESS * needed))

        lean = machines.with_each_device(smaller)
        fitting = choose(memories.workload, lean, config.batch, margin=0.0, limit=1).candidates[0].plan
        less = memories.fullest(fitting, config.batch).peak
        change = f"train with --plan {fitting}, for which {_size(less)} is predicted"
    except (UserError, RuntimeError, MemoryError):
        pass  # the model's memory cannot be predicted, or no Plan is smaller
    return PlanError(
        given,
        possible="shard=zero3, a smaller microbatch, recompute=full, tp, pp, or more devices",
        change=change,
    )


def _size(nbytes: float) -> str:
    return format_bytes(round(nbytes))
