"""Memory of each rank along the axis `pp`: how many bytes, at which moment of a step, and for what.

A rank holds the states below all the time. Gradients that are sharded are an exception: if a step is
one micro-batch, they exist in backward only. The rank also holds what each moment of the step adds, and
activations of several micro-batches, whose sizes `activations.py` gives. With pp > 1 there are also five
messages of the stream: one received ahead, four being sent. With `offload` there are the buffers of
`staging_bytes`, and with activations in files those of one more block, which is written or read while another
computes.

These are the tensors. On a GPU torch also allocates WORKSPACES for matrix products: together that is the peak
of allocated memory. To decide what fits, a Cluster adds its `reserved` bytes (contexts, libraries' buffers)
and the bytes that an allocator holds beyond the tensors: FRAGMENTS of the tensors' bytes, and the shards of
gradients all the time, because they are made on a stream of their own and other streams cannot use that
memory.

The memory that one kernel takes for itself, and that of the batch, are not counted.

Micro-batches in flight
-----------------------

Peaks of activation memory in a pipeline, as numbers of micro-batches that a rank holds.

A forward adds the activations of its stage and micro-batch; the backward B frees them. Where a backward has
two halves, I (gradients of inputs) keeps what W (gradients of weights) needs, and W frees that. For rank r of
p ranks, with v stages on each rank and m micro-batches, a rank holds:

    gpipe, looped-bfs   all m of each stage
    1f1b, interleaved   those of the first (v - 1) p + 2 (p - 1 - r) + 1 forwards (v = 1: p - r), which go
                        through the stages in rounds of p; after them each forward follows a backward
    zb-h1               p - r, and for r others what W needs
    zb-v                2 p - 1 - r on the way down and r + 1 on the way up; and at another moment, if there
                        are 2 p - r micro-batches, one more on the way down and one less on the way up
    dualpipe-v          2 p - r on the way down and r + 1 on the way up
    search              as many as the search was allowed, spread evenly over the rank's stages

A stage never holds more than m. Tests compare these numbers with the schedules' tables.

States
------

Bytes that training with Adam keeps for each parameter from step to step.

    shard        weights     gradients   optimizer
    none         w           4           8 + m
    zero1        w           4           (8 + m) / s
    zero3-once   4 / s       4           8 / s
    zero2        w           4 / s       (8 + m) / s
    zero3        4 / s       4 / s       8 / s

These are bytes per parameter. s is the sharding degree, w the bytes of a weight, and m those of the
optimizer's own copy of the weight: in fp32 w = 4 and m = 0, in bf16 w = 2 and m = 4. With zero3 and
zero3-once that copy is the only one between two steps. Looser exchange keeps more: see `_of_exchange`. With
`offload` a part that is outside of the device counts as nothing; of the optimizer's these are the moments.
A frozen parameter has a weight alone, w bytes or with zero3 w / s.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import NamedTuple

from shoal.predict.cost.device_kinds import Kinds
from shoal.predict.cost.layout import Layout
from shoal.predict.cost.memory.activations import block_memory, in_file, stream_bytes
from shoal.predict.cost.memory.rank import Moment, Outline, Pieces, gathered_bytes, moments_of
from shoal.predict.cost.time.offload import fits_host, staging_bytes, tiers_on
from shoal.predict.cost.time.split import as_kept, flop_costs, kept_pieces, pieces_by_stage, stored_pieces
from shoal.predict.cost.time.step import Costs
from shoal.spec.cluster import Cluster
from shoal.spec.plan import UNSHARDED, ByFields, Plan, SettledPlan, Sharding, Tiers
from shoal.spec.plan.schedules import Held, kind_of
from shoal.spec.workload import Workload


@lru_cache(maxsize=1 << 12)
def activation_peaks(
    schedule: str, ranks: int, virtual: int, microbatches: int, limit: int | None = None
) -> tuple[tuple[Held, ...], ...]:
    """Return the candidate peaks of activation memory, by rank.

    Args:
        schedule: Name of the pipeline schedule.
        ranks: Pipeline-parallel degree.
        virtual: Stages on a rank.
        microbatches: Micro-batches in a step.
        limit: With schedule=search, the most that a rank may hold, in micro-batches of one stage.
    """
    held = kind_of(schedule).held
    return tuple(held(rank, ranks, virtual, microbatches, limit) for rank in range(ranks))


_FP32 = 4.0  # bytes


class States(NamedTuple):
    """Bytes per parameter on a rank.

    Attributes:
        weights: Bytes of the weights that compute, or of the shards that they are gathered from.
        gradients: Bytes of the sums of gradients.
        optimizer: Bytes of Adam's two moments, and of its copy of the weights if these have 16 bit.
    """

    weights: float
    gradients: float
    optimizer: float


def states_of(plan: Plan, shards: float, tiers: Tiers | None = None) -> States:
    """Return the bytes for each parameter that a rank has after tensor and expert parallelism.

    Args:
        plan: The Plan, which says precision and sharding.
        shards: Sharding degree: the number of ranks that a state is cut over.
        tiers: Where states are kept; None for the Plan's `offload` on a CPU.
    """
    tiers = plan.tiers.of_cpu if tiers is None else tiers
    shards = max(shards, 1)
    width, copy = (2.0, _FP32) if plan.element_bytes == 2 else (_FP32, 0.0)
    moments = 2 * _FP32 if tiers.optimizer == "device" else 0.0
    sharding = plan.sharding
    cut = shards if sharding.cuts_optimizer else 1
    weights = _FP32 / shards if sharding.cuts_weights else width
    gradients = _FP32 / shards if sharding.cuts_gradients else _FP32
    return States(
        weights if tiers.parameters == "device" else 0.0,
        gradients if tiers.gradients == "device" else 0.0,
        (moments if sharding.cuts_weights else moments + copy) / cut + _of_exchange(plan, cut),
    )


def frozen_bytes(plan: Plan, shards: float, tiers: Tiers) -> float:
    """Return the bytes for each frozen parameter that a rank has: a weight in the type of the compute.

    The arguments are those of `states_of`.
    """
    if tiers.parameters != "device":
        return 0.0
    return plan.element_bytes / (max(shards, 1) if plan.sharding.cuts_weights else 1)


def _of_exchange(plan: Plan, cut: float) -> float:
    """Return what looser exchange keeps of each parameter, where a rank owns one of `cut` parts.

    Local updates keep an anchor and a momentum. Error feedback keeps what it left out of each element that it
    sends: of what the rank owns between workers, and of everything among the ranks of one worker. A rank that
    servers join has no moments, and in their place what it sends and the values that it got.
    """
    exchange = plan.exchanged
    kept = 2 * _FP32 / cut if exchange.merges else 0.0
    if exchange.compresses and exchange.feedback:
        is_owned = exchange.merges or exchange.is_served or plan.replicas > 1
        kept += _FP32 / (cut if is_owned else 1)
    return kept


def state_bytes(plan: Plan, shards: float, tiers: Tiers | None = None) -> float:
    """Return the sum of `states_of`."""
    return sum(states_of(plan, shards, tiers))


FRAGMENTS = 0.08
"""Bytes that an allocator holds in gaps which no tensor fits, as a share of the tensors' bytes."""

WORKSPACES = 2 * 32 * 2.0**20
"""Bytes that torch allocates on a GPU for matrix products to work in: cuBLAS and cuBLASLt, 32 MiB each."""

_MESSAGES = 5


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of a rank at its peak.

    Attributes:
        rank: Index along the axis `pp`; the ranks along the other axes hold as much.
        moment: Moment of the step: loss, head, block k from its end, or optimizer.
        parts: Bytes by name: weights, gradients, optimizer, activations, working, gathered, buckets,
            messages, staging, workspaces, fragments, reserved.
        states: Bytes of weights, gradients and optimizer between two steps.
        kept: Bytes that forwards keep for backward, with gathered weights if these are cut.
        tightness: Memory of the Cluster's `device` over the least memory of the devices that it sits on; 1
            where devices are equal.
        fits_host: Whether the host has memory for what the Plan keeps there.
    """

    rank: int
    moment: str
    parts: Mapping[str, float]
    states: float
    kept: float
    tightness: float = 1.0
    fits_host: bool = True

    @property
    def peak(self) -> float:
        """Bytes of all parts together."""
        return sum(self.parts.values())

    @property
    def required(self) -> float:
        """Bytes of the Cluster's `device` of which the peak would be as large a share as it is of its own.

        They are infinite if the host has no memory for what the Plan keeps there.
        """
        return self.peak * self.tightness if self.fits_host else math.inf

    @property
    def allocated(self) -> float:
        """Bytes that torch's allocator reports as allocated (`torch.cuda.max_memory_allocated`): tensors."""
        return self.held - self.parts.get("fragments", 0.0)

    @property
    def held(self) -> float:
        """Bytes that torch's allocator reports as reserved: tensors and gaps, but no contexts."""
        return self.peak - self.parts.get("reserved", 0.0)

    @property
    def largest(self) -> str:
        """Name of the largest part."""
        return max(self.parts, key=self.parts.__getitem__)

    def fits(self, cluster: Cluster, margin: float = 0.0) -> bool:
        """Return whether the peak fits in a device's memory when the share `margin` of it stays free."""
        return self.required <= cluster.device.memory * (1 - margin)


@dataclass(frozen=True, slots=True)
class _Rank:
    """Memory of a rank that does not depend on the sharding degree."""

    outline: Outline
    messages: float
    kept: float
    moments: tuple[Moment, ...]
    highest: Moment
    tightness: float


class Memories:
    """Computes the memory of a Workload's ranks under any Plan, and caches what Plans share.

    Args:
        workload: The work of the model that is trained.
        cluster: The machines that it runs on; None counts tensors alone.
        costs: Costs of the same workload and cluster, by which `split=cost` cuts the model into stages. None:
            the costs on the cluster, or FLOP if there is no cluster.
        copies: Whether the backend copies what it reduces and scatters, as gloo does.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster | None = None,
        costs: Costs | None = None,
        *,
        copies: bool = False,
    ) -> None:
        self.workload = workload
        self.cluster = cluster
        self._kinds = None if cluster is None or not cluster.parts else Kinds(cluster)
        self._costs = Costs(workload, cluster) if costs is None and cluster is not None else costs
        self._copies = copies
        self._pieces = cache(partial(Pieces, workload))
        self._uncovered, self._largest = ByFields(self._uncovered_of), ByFields(self._largest_of)

    def of(self, plan: SettledPlan, batch: int) -> tuple[RankMemory, ...]:
        """Return the memory of every rank along `pp`, in a step of `batch` samples.

        Raises:
            PlanError: The batch does not divide into the Plan's micro-batches, or the model into its stages.
        """
        plan = SettledPlan.of(plan, batch)
        layout, count = self.layout(plan), plan.microbatches_of(batch)
        ranks = (
            self._rank(plan, layout, outline, plan.sharding, plan.bucket)
            for outline in self._outlines(plan, layout, count)
        )
        return tuple(self._memory(plan, batch, rank) for rank in ranks)

    def fullest(self, plan: SettledPlan, batch: int) -> RankMemory:
        """Return the memory of the rank with the highest peak; skip ranks that cannot have it.

        Where devices differ, it is the rank whose peak is the largest share of its device.

        Args:
            plan: The Plan, with its micro-batch settled. It is not checked, since callers try many Plans.
            batch: Samples of a step.

        Raises:
            PlanError: The model does not divide into the Plan's stages.
        """
        sharding = plan.sharding if plan.sharding.communicates_each_micro_batch else UNSHARDED
        bucket = plan.bucket if sharding.bucket_is_memory else 0
        count = plan.microbatches_of(batch) if plan.pp > 1 else 1
        ranks = self._largest(plan, self.layout(plan), count, sharding, bucket)
        fullest = ranks[0]
        if len(ranks) > 1:
            fullest = max(ranks, key=lambda rank: self._tensors(plan, batch, rank))
        return self._memory(plan, batch, fullest)

    def _largest_of(
        self, plan: SettledPlan, layout: Layout, count: int, sharding: Sharding, bucket: int
    ) -> list[_Rank]:
        """Return the ranks of which one is the fullest; the last two are those of `moments_of`."""
        outlines = self._uncovered(plan, layout, count)
        return [self._rank(plan, layout, outline, sharding, bucket) for outline in outlines]

    def _uncovered_of(self, plan: SettledPlan, layout: Layout, count: int) -> list[Outline]:
        return _uncovered(self._outlines(plan, layout, count), self._tightness(plan))

    def beside_states(self, plan: SettledPlan, batch: int) -> list[tuple[float, float, float, float]]:
        """Return what ranks at both ends of the pipeline hold beside their states, if nothing is sharded.

        With a sharding they hold as much, or more. Mostly one of these ranks is the fullest of all. The
        arguments are those of `fullest`.

        Returns:
            For each rank its dense parameters, those of its experts, bytes of tensors at its peak, and its
            tightness.
        """
        layout, tightness = self.layout(plan), self._tightness(plan)
        places = {0, 1, plan.pp - 2, plan.pp - 1}
        count = plan.microbatches_of(batch)
        outlines = _uncovered(self._outlines(plan, layout, count, places), tightness)
        ranks = [self._rank(plan, layout, each, plan.sharding, plan.bucket) for each in outlines]
        return [
            (each.outline.dense, each.outline.experts, each.highest.whole + each.messages, each.tightness)
            for each in ranks
        ]

    def stages(self, plan: SettledPlan, batch: int) -> tuple[range, ...]:
        """Return the pieces of each pipeline stage: 0 is the embedding, the last one the end.

        Raises:
            PlanError: The model does not divide into the Plan's stages.
        """
        return self._ranges(plan, plan.microbatches_of(batch))

    def _ranges(self, plan: SettledPlan, count: int) -> tuple[range, ...]:
        if self._costs is not None:
            return self._costs.ranges(plan, count)
        return pieces_by_stage(self.workload, plan, count, partial(flop_costs, self.workload))

    def _tensors(self, plan: SettledPlan, batch: int, rank: _Rank) -> float:
        """Return the bytes of a rank's tensors at its peak; as `required` where devices differ."""
        states, moment = self._at_peak(plan, batch, rank, self._states(plan, rank.outline))
        tensors = sum(states) + moment.whole + rank.messages
        return tensors if self._kinds is None else self._memory(plan, batch, rank).required

    def _memory(self, plan: SettledPlan, batch: int, rank: _Rank) -> RankMemory:
        """Return the memory of a rank at its peak."""
        between = self._states(plan, rank.outline)
        states, moment = self._at_peak(plan, batch, rank, between)
        parts = {
            "weights": states.weights,
            "gradients": states.gradients,
            "optimizer": states.optimizer,
            "activations": moment.activations,
            "working": moment.working,
            "gathered": moment.gathered,
            "buckets": moment.buckets,
            "messages": rank.messages,
        }
        name = moment.name
        in_passes, in_update = self._staged(plan, rank.outline)
        if in_update > moment.whole + in_passes:
            name, in_passes = "optimizer", in_update
            parts.update(dict.fromkeys(("activations", "working", "gathered", "buckets"), 0.0))
        if in_passes:
            parts["staging"] = in_passes
        if self.cluster is not None:
            parts["fragments"] = FRAGMENTS * sum(parts.values())
            parts["workspaces"] = 0.0 if self.cluster.cores else WORKSPACES
            parts["reserved"] = self.cluster.reserved
        owned = (rank.outline.dense + rank.outline.experts) / (plan.shards * plan.cp)
        has_host = self.cluster is None or fits_host(plan, self.cluster, owned)
        return RankMemory(rank.outline.index, name, parts, sum(between), rank.kept, rank.tightness, has_host)

    def _staged(self, plan: SettledPlan, outline: Outline) -> tuple[float, float]:
        """Return the bytes of buffers in the passes and in the update; on GPUs the host has them."""
        if not plan.tiers.has_files or not (self.cluster is None or self.cluster.cores):
            return 0.0, 0.0
        shards = plan.shards * plan.cp
        root = outline.ends.embedding + outline.ends.head
        largest = max([root, *(each.weights for each in outline.stack.layers)])
        return staging_bytes(plan, (outline.dense + outline.experts) / shards, largest / shards)

    def _at_peak(self, plan: SettledPlan, batch: int, rank: _Rank, states: States) -> tuple[States, Moment]:
        """Return the states at a rank's peak, and its moment; `states` are those between two steps."""
        are_freed = plan.sharding.cuts_gradients and plan.tiers.gradients == "device"
        if self.cluster is None and are_freed and batch == plan.dp * plan.microbatch:
            shards = plan.shards * plan.cp
            highest = max(rank.moments, key=lambda moment: moment.whole + moment.freed / shards)
            return states._replace(gradients=highest.freed / shards), highest
        return states, rank.highest

    def _states(self, plan: SettledPlan, outline: Outline) -> States:
        """Return the bytes of the states of all parameters of a rank, between two steps."""
        shards = plan.shards * plan.cp
        tiers = tiers_on(plan, self.cluster)
        weights, gradients, optimizer = states_of(plan, shards, tiers)
        dense, experts = outline.dense, outline.experts
        frozen = 0.0
        if outline.frozen != (0.0, 0.0):
            degrees = shards, shards / plan.ep
            each = [frozen_bytes(plan, degree, tiers) for degree in degrees]
            frozen = outline.frozen[0] * each[0] + outline.frozen[1] * each[1]
        if not experts:
            return States(dense * weights + frozen, dense * gradients, dense * optimizer)
        of_expert = states_of(plan, shards / plan.ep, tiers)
        return States(
            dense * weights + experts * of_expert.weights + frozen,
            dense * gradients + experts * of_expert.gradients,
            dense * optimizer + experts * of_expert.optimizer,
        )

    def _outlines(
        self, plan: SettledPlan, layout: Layout, count: int, places: Container[int] | None = None
    ) -> Iterator[Outline]:
        """Yield the outline of each rank along `pp`, or of those at these places."""
        stages = self._ranges(plan, count)
        kept = kept_pieces(self.workload, plan, stages)
        stored = stored_pieces(self.workload, plan, stages)
        pieces = self._pieces(layout, kept, stored)
        if plan.pp == 1:
            return pieces.outlines(stages, (0,), ((Held((1.0,), (0.0,)),),), places)
        virtual = plan.stages // plan.pp
        held = activation_peaks(plan.schedule, plan.pp, virtual, count, plan.activations)
        return pieces.outlines(stages, plan.placement, held, places)

    def _rank(
        self, plan: SettledPlan, layout: Layout, outline: Outline, sharding: Sharding, bucket: int
    ) -> _Rank:
        stack, ends = outline.stack, outline.ends
        activations = outline.activations + max([each.stored for each in stack.layers], default=0.0)
        update = Moment("optimizer", freed=_FP32 * (outline.dense + layout.ep * outline.experts))
        moments = [
            *moments_of(sharding, bucket, layout, activations, stack, ends, copies=self._copies),
            update,
        ]
        return _Rank(
            outline,
            _MESSAGES * stream_bytes(self.workload, layout) if plan.pp > 1 else 0.0,
            activations + gathered_bytes(sharding, layout, stack, ends),
            tuple(moments),
            max(moments, key=lambda moment: moment.whole),
            self._tightness(plan)[outline.index],
        )

    def _tightness(self, plan: SettledPlan) -> Sequence[float]:
        """Return the tightness of each place along the pipeline: see `RankMemory`."""
        if self._kinds is None:
            return (1.0,) * plan.pp
        return [self._kinds.tightness(kinds) for kinds in self._kinds.by_place(plan)]

    def layout(self, plan: SettledPlan) -> Layout:
        """Return the layout of a Plan, with compile=auto settled if the machines are known."""
        layout = Layout.of(plan)
        return layout if self._costs is None else self._costs.settled(layout)


def memory_of(
    workload: Workload, plan: SettledPlan, batch: int, cluster: Cluster | None = None
) -> tuple[RankMemory, ...]:
    """Return the memory of every rank along `pp`. For many Plans, make one `Memories` instead.

    Args:
        workload: The work of the model that is trained.
        plan: The Plan that lays it over ranks.
        batch: Samples of a step.
        cluster: The machines that it runs on; None counts tensors alone.

    Raises:
        PlanError: The batch does not divide into the Plan's micro-batches, or the model into its stages.
    """
    return Memories(workload, cluster).of(plan, batch)


def _uncovered(outlines: Iterable[Outline], tightness: Sequence[float]) -> list[Outline]:
    """Return the outlines that no other on devices with as little memory covers; of equal ones, the first."""
    left: list[Outline] = []
    for outline in outlines:
        here = tightness[outline.index]
        if not any(tightness[other.index] >= here and other.covers(outline) for other in left):
            covered = [tightness[other.index] <= here and outline.covers(other) for other in left]
            left = [other for other, is_covered in zip(left, covered, strict=True) if not is_covered]
            left.append(outline)
    return left


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
