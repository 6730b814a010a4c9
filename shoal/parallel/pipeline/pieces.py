"""The pieces of a model that each pipeline stage has, as a Plan says.

The memory that the pieces of a model take on a rank: states of training, and activations.

Short-lived memory is not counted: buffers of collectives, gathered weights, the gradients of logits.
Activations are known only for Shoal's transformers, by formula; those of other models count as nothing, so
that only their states must fit.

Costs of a model's pieces: computed from its parameters, or measured.

Computed costs are enough to cut a model of equal blocks into stages that take equally long. Measured costs
also include work that is no product of matrices, and how far each product is from the device's peak.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.errors import ClusterError, ConfigError
from shoal.models import Mixture, Transformer
from shoal.parallel.local_shards import Cut
from shoal.parallel.pipeline.stage_layout import (
    StageLayout,
    named_part,
    parameters_by_piece,
    parts_by_piece,
    stages_of,
    tied_names,
)
from shoal.parallel.pipeline.stages import Stage, take_stages
from shoal.predict.cost import Costs, Layout, settle_split
from shoal.predict.cost.memory import block_memory, state_bytes
from shoal.predict.cost.time import workload_on
from shoal.spec.cluster import Cluster
from shoal.spec.plan import Plan, SettledPlan
from shoal.spec.plan.schedules import Times
from shoal.spec.plan.stages import (
    Cost,
    parse_split,
    ranges_of,
    split_by_cost,
    split_by_count,
    split_text,
    times_of,
)
from shoal.spec.workload import ModelShape, transformer_shape, workload_of


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


def computed_costs(model: nn.Module, layout: StageLayout) -> list[Cost]:
    """Return the FLOP of each piece for one token: embedding, blocks, end.

    The FLOP are twice the elements of each matrix in forward and four times in backward; for experts, only
    those that a token goes to. A look-up costs nothing. For Shoal's transformers attention counts too, over
    the whole context; the attention of other models is assumed equal in all blocks and negligible.

    Args:
        model: The whole model; the meta device will do.
        layout: The layout that names its pieces.
    """
    parameters = dict(model.named_parameters())
    looked_up = {
        f"{name}.weight" if name else "weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
    }
    shares = _shares_of_experts(model)
    attention = 0.0
    if isinstance(model, Transformer):
        attention = 4.0 * model.config.hidden * model.config.seq
    names = parameters_by_piece(model, layout)
    costs = []
    for piece, held in enumerate(names):
        is_end = piece == len(names) - 1
        matrices = sum(
            parameters[name].numel() * shares.get(name, 1.0)
            for name in held
            if parameters[name].ndim >= 2 and (is_end or name not in looked_up)
        )
        flop = 2.0 * matrices + (attention if 0 < piece < len(names) - 1 else 0.0)
        costs.append(Cost(flop, 2 * flop, _memory(parameters, held)))
    return costs


def measured_costs(
    model: nn.Module,
    layout: StageLayout,
    inputs: Any,
    loss: Callable[[Any], Tensor],
    rounds: int = 3,
) -> list[Cost]:
    """Return the seconds of each piece for one micro-batch on this device: embedding, blocks, end.

    Each piece runs as a stage of its own, forward and backward, one after another in this process. A piece
    without modules costs nothing, and its work counts with the block beside it. Work that the model does
    before a piece and outside all pieces counts with that piece.

    Args:
        model: The whole model with its values, as one rank would have it. Gradients that it has are lost.
        layout: The layout that names its pieces.
        inputs: The model's input for a micro-batch, such as tokens `[batch, seq]`.
        loss: A function from the model's output to a scalar. It counts with the end.
        rounds: Number of measurements of each piece, after one that does not count; the median is taken.

    Raises:
        ConfigError: `rounds` is less than 1.
        ModelError: The model does not match the layout, or two of its pieces other than embedding and end
            share a parameter.
    """
    if rounds < 1:
        raise ConfigError(
            f"costs of a model cannot be measured in {rounds} rounds",
            possible="1 or more",
            change="give, for example, rounds=3",
        )
    parameters = dict(model.named_parameters())
    names = parameters_by_piece(model, layout)
    owners, ranges = _filled(model, layout)
    stages = take_stages(model, layout, ranges)
    device = next(iter(parameters.values())).device
    seconds = [list(_round(stages, inputs, loss, device)) for _ in range(rounds + 1)][1:]
    model.zero_grad()
    costs = [Cost(0.0, 0.0, _memory(parameters, held)) for held in names]
    for stage, piece in enumerate(owners):
        forward, backward = (median(each[stage][way] for each in seconds) for way in (0, 1))
        costs[piece] = Cost(forward, backward, costs[piece].memory)
    return costs


def _filled(model: nn.Module, layout: StageLayout) -> tuple[list[int], dict[int, range]]:
    """Return the pieces that have modules, and the pieces of each as a stage; a piece without goes beside."""
    parts = parts_by_piece(model, layout)
    owners = [
        piece
        for piece, names in enumerate(parts)
        if any(isinstance(named_part(model, name), nn.Module) for name in names)
    ]
    edges = [0, *owners[1:], len(parts)]
    return owners, {stage: range(edges[stage], edges[stage + 1]) for stage in range(len(owners))}


def _round(
    stages: Sequence[Stage], inputs: Any, loss: Callable[[Any], Tensor], device: torch.device
) -> Iterator[tuple[float, float]]:
    """Yield, by stage, the seconds of a forward and of its backward."""
    forwards, backwards = [], []
    kept: list[tuple[Tensor | None, Tensor]] = []
    hidden: Tensor | None = None
    for stage in stages:
        began = _now(device)
        output: Tensor = stage(inputs, hidden)
        if stage.is_last:
            output = loss(output)
        forwards.append(_now(device) - began)
        kept.append((hidden, output))
        hidden = output.detach().requires_grad_()
    gradient: Tensor | None = None
    while kept:
        hidden, output = kept.pop()
        began = _now(device)
        if output.requires_grad:
            torch.autograd.backward(output, gradient)
        backwards.append(_now(device) - began)
        if hidden is not None:
            gradient = torch.zeros_like(hidden) if hidden.grad is None else hidden.grad
    return zip(forwards, reversed(backwards), strict=True)


def _now(device: torch.device) -> float:
    """Return the time when all work begun on the device is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def _memory(parameters: Mapping[str, nn.Parameter], held: frozenset[str]) -> float:
    """Return the bytes of states on a rank with whole pieces in fp32; `with_memory` considers Plans."""
    return state_bytes(Plan(), 1) * sum(parameters[name].numel() for name in held)


def _shares_of_experts(model: nn.Module) -> dict[str, float]:
    """Return the share of the experts' parameters that one token goes to, by name."""
    return {
        f"{name}.{kind}": module.per_token / module.experts
        for name, module in model.named_modules()
        if isinstance(module, Mixture)
        for kind in ("gate", "up", "down")
    }


@dataclass(frozen=True, slots=True)
class Room:
    """The memory that the stages of a rank must fit into.

    Attributes:
        limit: Bytes that a rank may hold.
        batch: Samples and tokens of a step; None if unknown. Then only states must fit.
        cuts: A rank's block of each parameter that tensor parallelism splits, by name.
    """

    limit: float
    batch: Batch | None
    cuts: Mapping[str, Cut]


@dataclass(frozen=True, slots=True)
class Pieces:
    """A model cut into stages.

    Attributes:
        layout: The layout that names the pieces.
        blocks: The model's blocks, which are pieces 1 to their number.
        ranges: The pieces of each stage.
        placement: By stage, the index along the axis `pp` of the rank that holds it.
        tied: Names of the parameters that the first and the last stage share, if these are on different
            ranks.
        times: Times of each stage, from its computed costs.
    """

    layout: StageLayout
    blocks: Sequence[nn.Module]
    ranges: tuple[range, ...]
    placement: tuple[int, ...]
    tied: frozenset[str]
    times: Times

    @property
    def split(self) -> str:
        """Return the number of blocks of each stage, as the Plan's `split` writes them."""
        return split_text([len(pieces) for pieces in self.ranges])

    def of(self, index: int) -> dict[int, range]:
        """Return the stages of one rank of the axis `pp`, with their pieces."""
        return {stage: self.ranges[stage] for stage, holder in enumerate(self.placement) if holder == index}

    def holder_of(self, model: nn.Module, name: str) -> int:
        """Return the index along `pp` of the rank that has a buffer of the model; 0 if all have it."""
        parts = parts_by_piece(model, self.layout)
        for stage, pieces in enumerate(self.ranges):
            if any(name.startswith(f"{part}.") for piece in pieces for part in parts[piece]):
                return self.placement[stage]
        return self.placement[0]

    def blocks_of(self, stage: int) -> list[nn.Module]:
        """Return the blocks of a stage, in order."""
        return [self.blocks[piece - 1] for piece in self.ranges[stage] if 1 <= piece <= len(self.blocks)]


def cut_pieces(
    model: nn.Module, plan: Plan, layout: StageLayout | None = None, room: Room | None = None
) -> Pieces:
    """Cut a model as the Plan's `split` says; the model is not changed.

    Args:
        model: The whole model; the meta device will do.
        plan: A Plan with pp > 1.
        layout: The layout that names the pieces; by default the one that Shoal knows.
        room: Memory that a split by cost must fit into; None for no limit.

    Raises:
        ModelError: No layout is known for the model, or the layout does not fit it.
        PlanError: The split does not fit the model, or the stages do not fit the room.
    """
    layout = stages_of(model) if layout is None else layout
    blocks = list(named_part(model, layout.blocks)._modules.values())
    placement = plan.placement
    costs = computed_costs(model, layout)
    if plan.split == "count":
        split = split_by_count(len(blocks), plan.stages)
    elif plan.split == "cost":
        if room is not None:
            costs = with_memory(costs, model, layout, plan, room.batch, room.cuts)
        split = _split_by_cost(costs, plan, room)
    else:
        split = parse_split(plan.split, len(blocks))
    shared = tied_names(model, layout)
    are_ends_apart = placement[0] != placement[-1]
    split = _with_modules(split, layout)
    return Pieces(
        layout=layout,
        blocks=blocks,
        ranges=ranges_of(split),
        placement=placement,
        tied=shared if are_ends_apart else frozenset(),
        times=times_of(costs, split),
    )


def _split_by_cost(costs: Sequence[Cost], plan: Plan, room: Room | None) -> tuple[int, ...]:
    if room is None:
        return split_by_cost(costs, plan.stages, plan.placement)
    held = None
    if room.batch is not None:
        # A schedule that is found for the stages' times needs the split; one for equal times holds about as
        # much.
        held = plan.schedule_for(room.batch.micro_batches(plan)).held_by_stage
    return split_by_cost(costs, plan.stages, plan.placement, room.limit, held=held)


def _with_modules(split: Sequence[int], layout: StageLayout) -> tuple[int, ...]:
    """Return the split with a block in the first and the last stage, if embedding or end have no modules."""
    counts = list(split)
    if not layout.embed:
        _lend(counts)
    if not layout.end:
        counts.reverse()
        _lend(counts)
        counts.reverse()
    return tuple(counts)


def _lend(counts: list[int]) -> None:
    """Give the first stage a second piece if it has one: from the next stage that has two."""
    if counts[0] == 1:
        lender = next(stage for stage, count in enumerate(counts) if count > 1)
        counts[0] += 1
        counts[lender] -= 1


CORES = "cores"
"""The name of a CPU in place of a GPU's."""


def device_name(device: torch.device) -> str:
    """Return the name of a GPU; `CORES` for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else CORES


def settled_on_device(
    model: nn.Module, plan: Plan, batch: Batch | None, device: str, limit: float | None
) -> Plan:
    """Return the Plan with the numbers of blocks that `split=cost` means on devices of this kind.

    Args:
        model: The whole model.
        plan: The Plan.
        batch: Samples and tokens of a step; None if unknown. Then micro-batches as the Plan says, four for
            each stage, fill the model's context.
        device: Name of a GPU, or `CORES`, whose costs are those of a laptop.
        limit: Bytes that a rank may hold; None if they are not known.

    Returns:
        The same Plan if the costs of the model, or of the device, are not known.

    Raises:
        PlanError: The model has fewer blocks than there are stages, or its states and activations do not fit.
    """
    found = _on_device(model, plan, device)
    if found is None or (batch is None and plan.shared is not None):
        return plan
    cluster, shape = found
    if batch is None:
        batch = Batch(plan.dp * (plan.microbatch or 1) * 4 * plan.stages, shape.seq)
    workload = workload_on(cluster, shape.replace(seq=batch.sequence))
    settled = SettledPlan.of(plan, batch.samples)
    room = math.inf if limit is None else limit + cluster.reserved
    return plan.replace(split=settle_split(settled, workload, cluster, batch.samples, room).split)


def costs_on_device(model: nn.Module, plan: Plan, batch: Batch, device: str) -> list[Cost] | None:
    """Return the seconds of each piece, by which `settled_on_device` splits; None if they are not known.

    The arguments are those of `settled_on_device`.
    """
    found = _on_device(model, plan, device)
    if found is None:
        return None
    cluster, shape = found
    costs = Costs(workload_on(cluster, shape.replace(seq=batch.sequence)), cluster)
    return costs.piece_costs(costs.settled(Layout.of(SettledPlan.of(plan, batch.samples))))


def _on_device(model: nn.Module, plan: Plan, device: str) -> tuple[Cluster, ModelShape] | None:
    """Return devices of this kind, and the shape of the model; None if either is not known."""
    if not isinstance(model, Transformer) or not all(each.requires_grad for each in model.parameters()):
        return None
    try:
        return _cluster_of(device, plan.ranks), transformer_shape(model.config.model_dump())
    except ClusterError:
        return None


def _cluster_of(device: str, ranks: int) -> Cluster:
    if device == CORES:
        return Cluster.preset("laptop").with_devices(ranks)
    return Cluster.assemble(device, ranks, None, None)
