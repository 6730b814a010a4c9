"""The memory that the pieces of a model take on a rank: states of training, and activations.

Short-lived memory is not counted: buffers of collectives, gathered weights, the gradients of logits.
Activations are known only for Shoal's transformers, by formula; those of other models count as nothing, so
that only their states must fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from torch import nn

from shoal.cost import Layout
from shoal.cost.memory import block_memory, state_bytes
from shoal.models import Mixture, Transformer
from shoal.parallel.layout import Cut
from shoal.parallel.pipeline.stage_layout import StageLayout, parameters_by_piece
from shoal.plan import Plan, SettledPlan
from shoal.plan.stages import Cost
from shoal.workload import transformer_shape, workload_of


class Batch(NamedTuple):
    """The samples and tokens of an optimizer step.

    Attributes:
        samples: Samples over all ranks.
        sequence: Tokens of each sample.
    """

    samples: int
    sequence: int

    def microbatch(self, plan: Plan) -> int:
        """Return the samples of one forward of one rank.

        Raises:
            PlanError: The batch does not divide into the Plan's micro-batches.
        """
        return SettledPlan.of(plan, self.samples).microbatch

    def micro_batches(self, plan: Plan) -> int:
        """Return the number of forwards of one rank; with shares, the most.

        Raises:
            PlanError: See `microbatch`.
        """
        return SettledPlan.of(plan, self.samples).microbatches_of(self.samples)


def with_memory(
    costs: Sequence[Cost],
    model: nn.Module,
    layout: StageLayout,
    plan: Plan,
    batch: Batch | None,
    cuts: Mapping[str, Cut] = MappingProxyType({}),
) -> list[Cost]:
    """Return the costs of pieces, with the memory that these take on a rank.

    Args:
        costs: Costs of each piece: the embedding, the blocks, the end.
        model: The whole model; the meta device will do.
        layout: The layout that names the model's pieces.
        plan: The Plan that lays it out.
        batch: Samples and tokens of a step; None if unknown. Then activations count as nothing.
        cuts: A rank's block of each parameter that tensor parallelism splits, by name.

    Raises:
        PlanError: The batch does not divide into the Plan's micro-batches.
    """
    names = list(parameters_by_piece(model, layout))
    if plan.placement[0] == plan.placement[-1]:
        names[-1] -= names[0]  # count a tied parameter once
    states = _states(model, plan, cuts)
    kept = _activations(model, plan, batch, len(costs))
    return [
        replace(cost, memory=sum(states[name] for name in held), activations=activations)
        for cost, held, activations in zip(costs, names, kept, strict=True)
    ]


def _states(model: nn.Module, plan: Plan, cuts: Mapping[str, Cut]) -> dict[str, float]:
    """Return the bytes of a parameter's states on a rank, by parameter."""
    shards = plan.shards * plan.cp
    frozen = float(plan.element_bytes)
    experts = {
        f"{name}.{kind}"
        for name, module in model.named_modules()
        if isinstance(module, Mixture)
        for kind in ("gate", "up", "down")
    }
    states = {}
    for name, parameter in model.named_parameters():
        elements, over = float(parameter.numel()), float(shards)
        if name in experts:
            elements, over = elements / plan.ep, over / plan.ep
        elif name in cuts:
            elements = math.prod(cuts[name].block_shape)
        states[name] = elements * (state_bytes(plan, over) if parameter.requires_grad else frozen)
    return states


def _activations(model: nn.Module, plan: Plan, batch: Batch | None, pieces: int) -> list[float]:
    """Return the bytes that each piece keeps of a micro-batch."""
    if batch is None or not isinstance(model, Transformer):
        return [0.0] * pieces
    # Norms as on a CPU, where they keep the most memory.
    shape = transformer_shape(model.config.model_dump()).replace(seq=batch.sequence, fused_passes=False)
    workload = workload_of(shape)
    layout = Layout.of(SettledPlan.of(plan, batch.samples))
    layer = block_memory(workload.layers[0], workload, layout, is_layer=True)
    end = block_memory(workload.end, workload, layout, is_layer=False)
    return [0.0, *[layer.kept] * (pieces - 2), end.kept]
