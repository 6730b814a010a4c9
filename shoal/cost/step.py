"""Seconds of one optimizer step, in closed form: quick enough for the planner to ask for thousands of Plans.

    step = pace + fill + sends + data + update

With m micro-batches over p ranks of v virtual stages, W_r the seconds of rank r's stages for one micro-batch,
forward and backward, with what they wait for within blocks:

    pace    m max W_r
    fill    the bubble: (sum of W_r - max W_r) / v for gpipe, 1f1b, looped-bfs and interleaved; less
            (p - 1) 2 W for zb-h1 and (p - 1) 3 W for zb-v, dualpipe-v and search, W being a rank's weight
            gradients, and never below the last stages' share
    sends   of hidden states between stages: 2 (p - 1) that fill and drain the pipeline, and of the 2 m v
            others those that `shoal.cost` takes to be exposed, half of them
    data    of gradients (and with zero3 of parameters) what backward (and forward) does not hide
    update  the optimizer's passes over this rank's state

What runs beside compute slows it: `contention` of its seconds count all the same. A table with other times
is played by `shoal.simulate`, which needs no closed form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.cluster import Cluster
from shoal.cost.block import BlockCost, block_cost
from shoal.cost.compute import pass_seconds
from shoal.cost.layout import Layout
from shoal.cost.network import Group, collective_seconds, send_seconds
from shoal.cost.split import pieces_by_stage
from shoal.plan import Plan
from shoal.plan.stages import Cost
from shoal.workload import Block, Parameters, Workload

__all__ = ["Costs", "StageCost", "StepCost"]

_UPDATE_BYTES = 30  # Adam: gradient, master weight and two moments read, these written, and the 16-bit weight
_EXPOSED_SENDS = 0.5
_ZERO_BUBBLE = {"zb-h1": 2.0, "zb-v": 3.0, "dualpipe-v": 3.0, "search": 3.0}
"""How many times a rank's weight gradients fill the bubble for each rank before it."""


@dataclass(frozen=True, slots=True)
class StageCost:
    """Of all stages of one rank, for one micro-batch; seconds.

    Attributes:
        forward, input, weight: With what is waited for within blocks.
        tensor, context, expert: Of these, what is communication, forward and backward together.
        parameters: That the rank has.
    """

    forward: float
    input: float
    weight: float
    tensor: float
    context: float
    expert: float
    parameters: Parameters

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.input + self.weight


@dataclass(frozen=True, slots=True)
class StepCost:
    """Of one step; seconds.

    Attributes:
        seconds: All of it.
        compute: Of the rank that sets the pace, without what it waits for.
        parts: What the rest is, by kind: tensor, context, expert, bubble, pipeline, data, optimizer.
    """

    seconds: float
    compute: float
    parts: dict[str, float] = field(default_factory=dict)


class Costs:
    """The costs of a Workload on a Cluster under any Plan; remembers what Plans share.

    Args:
        workload: What is trained.
        cluster: Where.
    """

    def __init__(self, workload: Workload, cluster: Cluster) -> None:
        self.workload = workload
        self.cluster = cluster
        self._blocks: dict[tuple[int, Layout], BlockCost] = {}
        self._stages: dict[tuple[object, ...], tuple[StageCost, ...]] = {}

    def step(self, plan: Plan, batch: int) -> StepCost:
        """Seconds of a step of `batch` samples under a Plan whose micro-batch is settled."""
        assert plan.microbatch is not None
        count = batch // plan.dp // plan.microbatch
        stages = self.stages(plan, count)
        slowest = max(stages, key=lambda stage: stage.total)
        pace = count * slowest.total
        virtual = plan.stages // plan.pp
        fill = sends = 0.0
        if plan.pp > 1:
            fill = (sum(stage.total for stage in stages) - slowest.total) / virtual
            hidden = _ZERO_BUBBLE.get(plan.schedule, 0.0) * (plan.pp - 1) * slowest.weight / virtual
            fill = max(fill - hidden, fill / (3 * plan.pp))
            each = self.send(plan)
            sends = each * (2 * (plan.pp - 1) + _EXPOSED_SENDS * 2 * count * virtual)
        unlike = dict.fromkeys(stages)  # most ranks of a long pipeline have the same
        data = max(self._data(plan, stage, count) for stage in unlike)
        update = max(self.update(plan, stage.parameters) for stage in unlike)
        parts = {
            "tensor": count * slowest.tensor,
            "context": count * slowest.context,
            "expert": count * slowest.expert,
            "bubble": fill,
            "pipeline": sends,
            "data": data,
            "optimizer": update,
        }
        compute = pace - parts["tensor"] - parts["context"] - parts["expert"]
        return StepCost(pace + fill + sends + data + update, compute, parts)

    def block(self, block: Block, layout: Layout) -> BlockCost:
        """What a block takes on a rank for one micro-batch."""
        key = id(block), layout
        found = self._blocks.get(key)
        if found is None:
            workload = self.workload
            found = block_cost(block, workload.hidden, workload.length, self.cluster, layout)
            self._blocks[key] = found
        return found

    def stages(self, plan: Plan, count: int) -> tuple[StageCost, ...]:
        """By rank along pp, what its stages take together for one micro-batch."""
        layout = Layout.of(plan)
        counted = count if plan.split == "cost" else 0
        key = (layout, plan.pp, plan.stages, plan.split, plan.placement if plan.pp > 1 else (), counted)
        if key not in self._stages:
            unlike: dict[tuple[int, ...], StageCost] = {}  # most ranks of a long pipeline have alike blocks
            ranks = []
            for held in self._held(plan, count):
                blocks = [piece for pieces in held for piece in pieces]
                names = tuple(map(id, blocks))
                if names not in unlike:
                    unlike[names] = self._stage(blocks, layout)
                ranks.append(unlike[names])
            self._stages[key] = tuple(ranks)
        return self._stages[key]

    def piece_costs(self, layout: Layout) -> list[Cost]:
        """Of each piece, what stages are cut by."""
        costs = [self.block(piece, layout) for piece in self.workload.pieces]
        return [Cost(each.forward, each.backward) for each in costs]

    def blocks_of(self, plan: Plan, count: int) -> list[Sequence[Block]]:
        """By stage of the whole pipeline, its blocks; one stage without a pipeline."""
        pieces = self.workload.pieces
        ranges = pieces_by_stage(self.workload, plan, count, lambda: self.piece_costs(Layout.of(plan)))
        return [pieces[each.start : each.stop] for each in ranges]

    def _held(self, plan: Plan, count: int) -> list[list[Sequence[Block]]]:
        """By rank, its stages' blocks."""
        held: list[list[Sequence[Block]]] = [[] for _ in range(plan.pp)]
        placement = plan.placement if plan.pp > 1 else (0,)
        for rank, blocks in zip(placement, self.blocks_of(plan, count), strict=True):
            held[rank].append(blocks)
        return held

    def _stage(self, blocks: Sequence[Block], layout: Layout) -> StageCost:
        costs = [self.block(block, layout) for block in blocks]
        weight = sum(cost.compute.weight for cost in costs)
        whole = sum(block.parameters.whole for block in blocks)
        divided = sum(block.parameters.divided for block in blocks)
        experts = sum(block.parameters.experts for block in blocks)
        return StageCost(
            sum(cost.forward for cost in costs),
            sum(cost.backward for cost in costs) - weight,
            weight,
            sum(sum(cost.tensor) for cost in costs),
            sum(sum(cost.context) for cost in costs),
            sum(sum(cost.expert) for cost in costs),
            Parameters(whole, divided // layout.tp, experts // layout.ep),
        )

    def send(self, plan: Plan) -> float:
        """Seconds of one micro-batch's hidden state from a stage to the next."""
        layout = Layout.of(plan)
        nbytes = (
            float(layout.width) * layout.microbatch * self.workload.length / plan.cp * self.workload.hidden
        )
        if plan.tensor != "plain":
            nbytes /= plan.tp
        return send_seconds(nbytes, plan.ranks // plan.pp, self.cluster)

    def _data(self, plan: Plan, stage: StageCost, count: int) -> float:
        """Seconds of the gradients' (and parameters') exchange that nothing hides."""
        ranks = plan.dp * plan.cp
        if ranks == 1:
            return 0.0
        device = self.cluster.device
        parameters, width = stage.parameters.total, Layout.of(plan).width
        shards = Group(plan.shards * plan.cp, plan.tp)
        if plan.shard == "none":  # nothing is cut: gradients are added up over all that see other tokens
            replicas = Group(ranks, plan.tp)
        else:
            replicas = Group(plan.replicas, plan.tp * plan.cp * plan.shards)
        forward, backward = stage.forward, stage.input + stage.weight
        virtual = plan.stages // plan.pp
        if virtual > 1:  # gradients of a stage are complete while the rank's other stages compute
            backward *= max(1.0, min(count, plan.pp) * (virtual - 1) / virtual)
        if plan.shard == "zero3":
            gather = collective_seconds("all_gather", width * parameters, shards, self.cluster)
            scatter = collective_seconds("reduce_scatter", 4.0 * parameters, shards, self.cluster)
            exposed = max(0.0, gather - forward) + max(0.0, gather + scatter - backward)
            seconds = count * (exposed + device.contention * (2 * gather + scatter))
        else:
            seconds = 0.0
            if plan.shard != "none":
                times = count if plan.shard == "zero2" else 1
                reduce = collective_seconds("reduce_scatter", 4.0 * parameters, shards, self.cluster)
                gather = collective_seconds("all_gather", width * parameters, shards, self.cluster)
                seconds += times * max(device.contention * reduce, reduce - backward)
                seconds += max(device.contention * gather, gather - forward)
        if replicas.size > 1:
            owned = parameters / (plan.shards * plan.cp if plan.shard != "none" else 1)
            reduce = collective_seconds("all_reduce", 4.0 * owned, replicas, self.cluster)
            seconds += max(device.contention * reduce, reduce - backward)
        return seconds

    def update(self, plan: Plan, parameters: Parameters) -> float:
        """Seconds of the optimizer's passes over what a rank with so many parameters owns of them."""
        shards = plan.shards * plan.cp if plan.shard != "none" else 1
        return pass_seconds(self.cluster.device, _UPDATE_BYTES * parameters.total / shards, 4)
