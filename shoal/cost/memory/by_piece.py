"""Memory of each piece of a model: its embedding, its layers, its end."""

from __future__ import annotations

from typing import NamedTuple

from shoal.cost.memory.activations import block_memory, in_file
from shoal.cost.memory.memory import Memories
from shoal.cost.memory.states import States, frozen_bytes, states_of
from shoal.cost.time.split import as_kept, kept_pieces, stored_pieces
from shoal.plan import SettledPlan


class PieceMemory(NamedTuple):
    """Bytes of a piece on each rank that has it.

    Attributes:
        name: `embedding`, `layer 0` and so on, or `end`.
        place: Index along `pp` of the ranks that have it.
        states: Bytes of weights, gradients and optimizer between two steps.
        activations: Bytes that the forward of one micro-batch keeps for backward in memory.
        stored: Bytes that it keeps in a file.
    """

    name: str
    place: int
    states: States
    activations: float
    stored: float = 0.0


def by_piece(memories: Memories, plan: SettledPlan, batch: int) -> list[PieceMemory]:
    """Return the memory of every piece, in the model's order.

    Weights that embedding and end share count with the embedding alone.

    Args:
        memories: Memories of the workload on its machines.
        plan: The Plan that lays it over ranks.
        batch: Samples of a step.

    Raises:
        PlanError: The batch does not divide into the Plan's micro-batches, or the model into its stages.
    """
    plan, workload = SettledPlan.of(plan, batch), memories.workload
    layout, last = memories.layout(plan), len(workload.layers) + 1
    stages = memories.stages(plan, batch)
    kept, stored = (which(workload, plan, stages) for which in (kept_pieces, stored_pieces))
    placement = plan.placement if plan.pp > 1 else (0,)
    places = {piece: place for stage, place in zip(stages, placement, strict=True) for piece in stage}
    shards = plan.shards * plan.cp
    dense, expert = states_of(plan, shards), states_of(plan, shards / plan.ep)
    tiers = plan.tiers.of_cpu
    frozen, frozen_expert = (frozen_bytes(plan, each, tiers) for each in (shards, shards / plan.ep))
    found = []
    for piece, block in enumerate(workload.pieces):
        made = as_kept(block) if piece in kept else block
        memory = block_memory(made, workload, layout, is_layer=0 < piece < last)
        states = States(*(memory.dense * a + memory.experts * b for a, b in zip(dense, expert, strict=True)))
        states = states._replace(
            weights=states.weights + memory.frozen * frozen + memory.frozen_experts * frozen_expert
        )
        name = "embedding" if piece == 0 else "end" if piece == last else f"layer {piece - 1}"
        if piece in stored:
            memory = in_file(memory)
        found.append(PieceMemory(name, places[piece], states, memory.kept, memory.stored))
    return found
