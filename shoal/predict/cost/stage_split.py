"""The split of a model into pipeline stages that a Plan with `split=cost` means, as numbers of blocks.

Training, simulation and predictions of memory take it from here, so that all of them mean the same stages. It
is the split by the seconds of the blocks on the machines, unless a rank does not have the memory for that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from shoal.errors import PlanError
from shoal.predict.cost.layout import Layout
from shoal.predict.cost.memory.activations import block_memory
from shoal.predict.cost.memory.memory import Memories, activation_peaks, frozen_bytes, state_bytes
from shoal.predict.cost.time.step import Costs
from shoal.spec.cluster import Cluster
from shoal.spec.plan import SettledPlan
from shoal.spec.plan.stages import Cost, ranges_of, split_by_cost, split_text
from shoal.spec.workload import Workload

_TRIES = 4  # splits, each with what ranks of the one before need beyond their pieces


def settle_split(
    plan: SettledPlan, workload: Workload, cluster: Cluster, batch: int, limit: float | None = None
) -> SettledPlan:
    """Return the Plan with the number of blocks of each stage; the same Plan if it says them, or has none.

    Args:
        plan: The Plan.
        workload: The work of the model that it splits.
        cluster: The machines, with the memory that training may take of a device.
        batch: Samples of a step.
        limit: Bytes that a rank may hold. It is an error if with each split a rank's states and what its
            micro-batches keep are more. None for the memory of the Cluster's device; if no split fits there,
            it is one of which the fullest rank lacks least.

    Raises:
        PlanError: The model has fewer blocks than there are stages, or no split keeps within `limit`.
    """
    if plan.pp == 1 or plan.split != "cost":
        return plan
    costs = Costs(workload, cluster)
    memories = Memories(workload, cluster, costs)
    count, layout = plan.microbatches_of(batch), memories.layout(plan)
    best = plan.replace(split=split_text([len(stage) for stage in costs.ranges(plan, count)]))
    memory = cluster.device.memory if limit is None else limit
    least = memories.fullest(best, batch).required - memory
    if least <= 0:
        return best
    pieces = _with_memory(costs.piece_costs(layout), workload, plan, layout)
    paces = costs.paces(plan)
    factors = [paces[place] for place in plan.placement] if paces else None
    held, beyond = _held(plan, count), (0.0, 0.0, 0.0)
    for attempt in range(_TRIES):
        first, middle, last = beyond
        tried = [_heavier(pieces[0], first), *pieces[1:-1], _heavier(pieces[-1], last)]
        try:
            counts = split_by_cost(tried, plan.stages, plan.placement, memory - middle, count, held, factors)
        except PlanError:
            if limit is not None and attempt == 0:
                raise
            break
        found = plan.replace(split=split_text(counts))
        excess = memories.fullest(found, batch).required - memory
        if excess < least:
            best, least = found, excess
        if excess <= 0:
            break
        beyond = _beyond(memories, found, batch, pieces, counts, held)
    return best


def _heavier(cost: Cost, memory: float) -> Cost:
    return replace(cost, memory=max(0.0, cost.memory + memory))


def _beyond(
    memories: Memories,
    plan: SettledPlan,
    batch: int,
    pieces: Sequence[Cost],
    counts: Sequence[int],
    held: Sequence[float],
) -> tuple[float, float, float]:
    """Return the bytes that ranks need beyond the sums of their pieces, such as gathered weights and logits.

    Returns:
        The most of any rank without an end of the model, and what the first and the last rank need beyond
        that; in the order first, middle, last.
    """
    summed = [0.0] * plan.pp
    for place, stage, of_stage in zip(plan.placement, ranges_of(counts), held, strict=True):
        here = pieces[stage.start : stage.stop]
        summed[place] += sum(cost.memory + of_stage * cost.activations for cost in here)
    needed = [each.required - own for each, own in zip(memories.of(plan, batch), summed, strict=True)]
    first, last = plan.placement[0], plan.placement[-1]
    middle = max([each for place, each in enumerate(needed) if place not in (first, last)], default=0.0)
    middle = middle or min(needed)
    return needed[first] - middle, middle, needed[last] - middle if last != first else 0.0


def _with_memory(costs: Sequence[Cost], workload: Workload, plan: SettledPlan, layout: Layout) -> list[Cost]:
    """Return the costs with the bytes of each piece on a rank: its states, and what a micro-batch keeps."""
    shards, last = plan.shards * plan.cp, len(costs) - 1
    dense, experts = state_bytes(plan, shards), state_bytes(plan, shards / plan.ep)
    frozen, frozen_experts = (frozen_bytes(plan, of, plan.tiers) for of in (shards, shards / plan.ep))
    found = []
    for place, (cost, block) in enumerate(zip(costs, workload.pieces, strict=True)):
        memory = block_memory(block, workload, layout, is_layer=0 < place < last)
        states = memory.dense * dense + memory.experts * experts
        states += memory.frozen * frozen + memory.frozen_experts * frozen_experts
        if place == last and workload.tied and plan.placement[0] != plan.placement[-1]:
            tied = workload.embedding
            states += (tied.parameters.divided * dense + tied.frozen.divided * frozen) / layout.tp
        found.append(Cost(cost.forward, cost.backward, states, memory.kept))
    return found


def _held(plan: SettledPlan, count: int) -> list[float]:
    """Return, by stage, the most micro-batches whose activations it holds at any of its rank's peaks."""
    peaks = activation_peaks(plan.schedule, plan.pp, plan.stages // plan.pp, count, plan.activations)
    seen: dict[int, int] = defaultdict(int)
    held = []
    for rank in plan.placement:
        held.append(max(moment.whole[seen[rank]] for moment in peaks[rank]))
        seen[rank] += 1
    return held
