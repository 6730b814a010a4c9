"""Seconds of one optimizer step, in closed form: quick enough for thousands of Plans of the planner.

    step = pace + fill + sends + data + update

There are m micro-batches over p ranks of v virtual stages. W_r is the seconds of rank r's stages for one
micro-batch, forward and backward, with the waits inside blocks:

    pace    m max W_r
    fill    the bubble: (sum of W_r - max W_r) / v for gpipe, 1f1b, looped-bfs and interleaved; less
            (p - 1) 2 W for zb-h1 and (p - 1) 3 W for zb-v, dualpipe-v and search, where W is the seconds of
            a rank's weight gradients; never below the last stages' share
    sends   hidden states that travel between stages: 2 (p - 1) messages that fill and drain the pipeline,
            and half of the 2 m v others, the share that is assumed to be exposed
    data    exposed communication of gradients and weights: see `data_parallel.py`
    update  the optimizer's passes over this rank's state, and the passes that add gradients to their sums

Communication beside compute slows the compute by `contention` times its own seconds. `shoal.simulate` needs
no closed form: it plays a table of operations with any times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.cluster import Cluster
from shoal.cost.collectives.network import send_seconds
from shoal.cost.layout import Layout
from shoal.cost.time.block import BlockCost
from shoal.cost.time.bucket_times import SUM_WIDTH, sent_width
from shoal.cost.time.buckets import owned_by_rank, parameters_on_rank
from shoal.cost.time.data_parallel import DataParallelCosts, Runs, StageWork, runs_of
from shoal.cost.time.hosts import HostCosts
from shoal.cost.time.passes import stream_seconds
from shoal.cost.time.split import pieces_by_stage
from shoal.plan import Groups, SettledPlan
from shoal.plan.schedules import kind_of
from shoal.plan.stages import Cost
from shoal.workload import Block, Parameters, Workload

__all__ = ["UPDATE_BYTES", "Costs", "PipelineCost", "StageCost", "StepCost", "Unlike"]

UPDATE_BYTES = (
    30  # Adam reads gradient, master weight, two moments; it writes the last three and a 16-bit weight
)
_NORM_BYTES = 4  # reads the sums of gradients
_ADAM_BYTES = 28  # reads gradient, weight and two moments in fp32, writes the last three
_COPY_BYTES = 6  # reads the weight in fp32, writes the 16-bit weight that computes
_EXPOSED_SENDS = 0.5


@dataclass(frozen=True, slots=True)
class StageCost:
    """Seconds of all stages of one rank, for one micro-batch.

    Attributes:
        forward, input, weight: Seconds of forward and of the two halves of backward, with waits in blocks.
        tensor, context, expert: Seconds of communication in these, forward and backward together.
        late: Seconds in these that ranks wait for late ranks.
        parameters: Number of parameters on the rank.
        stages: Work of each stage.
    """

    forward: float
    input: float
    weight: float
    tensor: float
    context: float
    expert: float
    late: float
    parameters: Parameters
    stages: tuple[StageWork, ...]

    @property
    def total(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + self.input + self.weight


class Unlike(NamedTuple):
    """Ranks along a pipeline that have equal stages.

    Attributes:
        stage: Cost of the stages of each.
        number: Number of these ranks.
        waits: Seconds until the first of them can begin its first forward.
        rests: Seconds from the last backward of the first of them to that of the pipeline's first rank.
    """

    stage: StageCost
    number: int
    waits: float
    rests: float


@dataclass(frozen=True, slots=True)
class PipelineCost:
    """Seconds of the forwards and backwards of a step, which do not depend on the sharding.

    Attributes:
        slowest: Cost of the rank that sets the pace.
        unlike: Groups of equal ranks; a long pipeline has few.
        pace, fill, sends: Seconds of the terms in the formula above.
    """

    slowest: StageCost
    unlike: tuple[Unlike, ...]
    pace: float
    fill: float
    sends: float

    @property
    def total(self) -> float:
        """Seconds of pace, fill and sends."""
        return self.pace + self.fill + self.sends


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one step.

    Attributes:
        seconds: Seconds of the whole step.
        compute: Seconds of compute on the rank that sets the pace, without its waits.
        parts: The other seconds, by kind: tensor, context, expert, bubble, pipeline, data, straggler,
            optimizer.
    """

    seconds: float
    compute: float
    parts: dict[str, float] = field(default_factory=dict)


_Held = tuple[Runs, ...]
"""The blocks of each stage of a rank."""


class Costs:
    """Computes the costs of a Workload on a Cluster under any Plan, and caches what Plans share.

    Args:
        workload: The work of the model that is trained.
        cluster: The machines that it runs on.
    """

    def __init__(self, workload: Workload, cluster: Cluster) -> None:
        self.workload = workload
        self.cluster = cluster
        self._hosts = HostCosts(workload, cluster)
        self._is_torch = any(piece.sums for piece in (*workload.layers[:1], workload.end))
        self._stages: dict[tuple[object, ...], tuple[StageCost, ...]] = {}
        self._pipelines: dict[tuple[object, ...], PipelineCost] = {}
        self._cuts: dict[tuple[object, ...], list[_Held]] = {}
        self._ranks: dict[tuple[_Held, Layout], StageCost] = {}
        self._data_parallel = DataParallelCosts(workload, cluster, self.block)

    def step(self, plan: SettledPlan, batch: int) -> StepCost:
        """Return the seconds of a step of `batch` samples under a Plan whose micro-batch is settled."""
        count = plan.microbatches_of(batch)
        pipeline = self.pipeline(plan, count)
        slowest = pipeline.slowest
        data = self._data(plan, pipeline, count)
        update = max(self.after(plan, stage.parameters, count) for stage, *_ in pipeline.unlike)
        parts = {
            "tensor": count * slowest.tensor,
            "context": count * slowest.context,
            "expert": count * slowest.expert,
            "bubble": pipeline.fill,
            "pipeline": pipeline.sends,
            "data": data,
            "straggler": count * slowest.late,
            "optimizer": update,
        }
        compute = pipeline.pace - sum(parts[name] for name in ("tensor", "context", "expert", "straggler"))
        return StepCost(pipeline.total + data + update, compute, parts)

    def pipeline(self, plan: SettledPlan, count: int) -> PipelineCost:
        """Return the cost of `count` micro-batches on the ranks along pp, without the cost of sharding."""
        key = (Layout.of(plan), plan.dp, plan.pp, plan.schedule, plan.virtual, plan.split, count)
        found = self._pipelines.get(key)
        if found is None:
            found = self._pipelines[key] = self._pipeline(plan, count)
        return found

    def _pipeline(self, plan: SettledPlan, count: int) -> PipelineCost:
        stages = self.stages(plan, count)
        slowest = max(stages, key=lambda stage: stage.total)
        fill = sends = 0.0
        bubble_fill = kind_of(plan.schedule).bubble_fill
        if plan.pp > 1:
            virtual = plan.stages // plan.pp
            fill = (sum(stage.total for stage in stages) - slowest.total) / virtual
            hidden = bubble_fill * (plan.pp - 1) * slowest.weight / virtual
            fill = max(fill - hidden, fill / (3 * plan.pp))
            sends = self.send(plan) * exposed_sends(plan.pp, count, virtual)
        unlike: dict[StageCost, Unlike] = {}
        waits = rests = 0.0
        for stage in stages:
            first = unlike.get(stage, Unlike(stage, 0, waits, rests))
            unlike[stage] = first._replace(number=first.number + 1)
            waits += stage.stages[0].forward
            rests += 0.0 if bubble_fill else stage.stages[0].backward
        return PipelineCost(slowest, tuple(unlike.values()), count * slowest.total, fill, sends)

    def block(self, block: Block, layout: Layout) -> BlockCost:
        """Return the cost of a block on a rank for one micro-batch, with the device's waits for the host."""
        return self._hosts.block(block, layout)

    def settled(self, layout: Layout) -> Layout:
        """Return the layout with compile=auto settled: the quicker of blocks and none for a micro-batch."""
        return self._hosts.settled(layout)

    def stages(self, plan: SettledPlan, count: int) -> tuple[StageCost, ...]:
        """Return, by rank along pp, the cost of its stages together for one micro-batch."""
        layout = Layout.of(plan)
        key = layout, plan.pp, plan.schedule, plan.virtual, plan.split, count if plan.split == "cost" else 0
        found = self._stages.get(key)
        if found is None:
            held = self._cut(plan, count) if plan.split == "cost" else self._cuts.get(key[1:])
            if held is None:
                held = self._cuts[key[1:]] = self._cut(plan, count)
            found = self._stages[key] = tuple([self._rank(blocks, layout) for blocks in held])
        return found

    def piece_costs(self, layout: Layout) -> list[Cost]:
        """Return the cost of each block, for splitting stages."""
        costs = [self.block(piece, layout) for piece in self.workload.pieces]
        return [Cost(each.forward, each.backward) for each in costs]

    def blocks_of(self, plan: SettledPlan, count: int) -> list[Sequence[Block]]:
        """Return the blocks of each stage of the whole pipeline; one stage without a pipeline."""
        pieces = self.workload.pieces
        ranges = pieces_by_stage(self.workload, plan, count, lambda: self.piece_costs(Layout.of(plan)))
        return [pieces[each.start : each.stop] for each in ranges]

    def _cut(self, plan: SettledPlan, count: int) -> list[_Held]:
        """Return the blocks of each rank's stages."""
        held: list[list[Runs]] = [[] for _ in range(plan.pp)]
        placement = plan.placement if plan.pp > 1 else (0,)
        for rank, blocks in zip(placement, self.blocks_of(plan, count), strict=True):
            held[rank].append(runs_of(blocks))
        return [tuple(stages) for stages in held]

    def _rank(self, held: _Held, layout: Layout) -> StageCost:
        """Return the cost of a rank with these stages, cached."""
        key = held, layout
        found = self._ranks.get(key)
        if found is None:
            found = self._ranks[key] = self._stage_cost(held, layout)
        return found

    def _stage_cost(self, held: _Held, layout: Layout) -> StageCost:
        works = []
        weight = tensor = context = expert = late = 0.0
        whole = divided = experts = 0
        for runs in held:
            forward = backward = computed = 0.0
            for block, number in runs:
                cost, parameters = self.block(block, layout), block.parameters
                forward += number * cost.forward
                backward += number * cost.backward
                computed += number * (cost.compute.forward + cost.compute.backward)
                weight += number * cost.compute.weight
                tensor += number * sum(cost.tensor)
                context += number * sum(cost.context)
                expert += number * sum(cost.expert)
                late += number * sum(cost.late)
                whole += number * parameters.whole
                divided += number * parameters.divided
                experts += number * parameters.experts
            works.append(StageWork(runs, forward, backward, computed / (forward + backward)))
        return StageCost(
            sum(work.forward for work in works),
            sum(work.backward for work in works) - weight,
            weight,
            tensor,
            context,
            expert,
            late,
            parameters_on_rank(Parameters(whole, divided, experts), layout.tp, layout.ep),
            tuple(works),
        )

    def send(self, plan: SettledPlan) -> float:
        """Return the seconds to send one micro-batch's hidden state from a stage to the next."""
        return self.send_apart(Layout.of(plan), plan.ranks // plan.pp)

    def send_apart(self, layout: Layout, apart: int) -> float:
        """Return the seconds to send it to a rank that is `apart` ranks away in the mesh's order."""
        nbytes = float(layout.width) * layout.microbatch * self.workload.length / layout.cp
        nbytes *= self.workload.hidden
        if layout.tensor != "plain":
            nbytes /= layout.tp
        return send_seconds(nbytes, apart, self.cluster)

    def _data(self, plan: SettledPlan, pipeline: PipelineCost, count: int) -> float:
        """Return the exposed seconds of data-parallel communication."""
        if plan.ranks == plan.pp:  # tp > 1 needs some, for parameters that every rank has whole
            return 0.0
        slowest = every = before = after = 0.0
        for stage, number, waits, rests in pipeline.unlike:
            exposed = self._data_parallel.in_micro_batch(plan, stage.stages)
            slowest, every = max(slowest, stage.total + exposed), every + number * exposed
            first, last = self._data_parallel.in_step(plan, stage.stages, count)
            before, after = max(before, first - waits), max(after, last - rests)
        pace = slowest - pipeline.slowest.total
        fill = max(0.0, every - pace) * plan.pp / plan.stages
        return before + after + count * pace + fill

    def after(self, plan: SettledPlan, parameters: Parameters, count: int) -> float:
        """Return the seconds of a step of `count` micro-batches in which only passes over parameters run.

        These are the optimizer's and those of sums of gradients, without what hides the waits for the host.
        """
        seconds = self.update(plan, parameters) + self.gradient_sums(plan, parameters, count)
        if self.workload.synchronises:
            return seconds
        waits = count * self._hosts.waits(Layout.of(plan)) / plan.pp
        return seconds - min(seconds, waits)

    def update(self, plan: SettledPlan, parameters: Parameters) -> float:
        """Return the seconds of the optimizer's passes over the rank's shard of these parameters."""
        nbytes = UPDATE_BYTES
        if self._is_torch:
            nbytes = _NORM_BYTES + _ADAM_BYTES + (_COPY_BYTES if plan.element_bytes == 2 else 0)
        return stream_seconds(self.cluster.device, nbytes * owned_by_rank(parameters, plan), 4)

    def gradient_sums(self, plan: SettledPlan, parameters: Parameters, count: int) -> float:
        """Return the seconds in which torch adds the gradients of `count` micro-batches to sums in fp32.

        The first gradient is copied. Products may add them without a pass. If each is copied to a bucket that
        ranks reduce at once, there is no pass here. With reduce=bf16 the sums are cast, and cast back.
        """
        dense = Groups.of(plan).dense
        ranks = dense.shards.size * dense.replicas.size
        if plan.sharding.cuts_gradients and dense.shards.size > 1:
            return 0.0
        nbytes = 0
        if self._is_torch:
            nbytes = count * (plan.element_bytes + SUM_WIDTH) + (count - 1) * SUM_WIDTH
        if ranks > 1 and sent_width(plan) != SUM_WIDTH:
            nbytes += 2 * (SUM_WIDTH + sent_width(plan))
        held = parameters.whole + parameters.divided + parameters.experts
        return stream_seconds(self.cluster.device, float(nbytes * held), 0)


def exposed_sends(ranks: int, count: int, virtual: int) -> float:
    """Return how many sends of a step are exposed.

    Args:
        ranks: Pipeline-parallel degree.
        count: Number of micro-batches.
        virtual: Stages on a rank.
    """
    return 2 * (ranks - 1) + _EXPOSED_SENDS * 2 * count * virtual
