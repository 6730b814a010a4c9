"""Seconds of a step's parts, and a lower bound on the step, quick enough for thousands of Plans.

`Costs` has the seconds of blocks, stages, messages and the optimizer under any Plan; `shoal.predict.simulate`
plays steps made of them. No step ends earlier than `Costs.least` says. Let f_s and b_s be the seconds of
forward and backward of stage s with all that it waits for, W_r those of all stages of rank r, m the number of
micro-batches, and x the seconds of a message between stages:

    begin   Rank r begins when the first micro-batch has gone through the stages before its first one:
            the sum of f_s + x over these
    work    Rank r does m W_r seconds of work one after another
    stage   Each stage does m (f_s + b_s) between its first micro-batch's way down and its last one's way up
    drain   After its last backward, those of the stages before its first one follow: the sum of b_s + x. If
            the gradients of weights may wait, only those of inputs follow
    laps    Rank r of 1f1b or zb-h1 holds k micro-batches at most. So each k-th goes forward only when the one
            before it is back: m / k laps of f and b of all stages from r on, and twice their messages
    data    weights before the first forward, and gradients after the last backward: see `data_parallel.py`
    update  the slowest rank's optimizer, and the passes that add gradients to their sums

The bound is the largest of begin + work or laps + drain over all ranks, with data, update and the wait for
the slowest rank. Communication beside compute slows the compute by `contention` times its own seconds.

Where devices differ, each rank along the pipeline costs what it costs on those of its devices that take
longest: `at` gives the costs there, which are those of a uniform Cluster.

Ranks that share cores
----------------------

Seconds of a step where ranks outnumber the cores that they compute on.

Rates that were measured with all ranks busy are the rates of a share of a core. A rank that waits, as in a
pipeline, leaves its share to the others: with k of n ranks at work on c cores, each has c / k of a core
instead of c / n, and at most a whole core. All working ranks speed up by the same factor, so the order of
events does not change. A step that was simulated at the shared rate only needs a faster clock. It takes

    integral over the step of max(k, c) / n dt

Parts of compute
----------------

What compute is made of: the seconds that its FLOP need at the device's peak, and what is lost beyond them.

ideal       the FLOP of products and attention at the peak of the precision; causal attention has half
products    products take longer: their tiles and waves are not full, memory is slow, the clock is lower
attention   attention takes longer
passes      passes over memory, and the passes in which products' operands are cast to 8 bits
recompute   what backward computes again
host        the device waits for the host
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

from shoal.predict.cost.collectives.link_use import alike_boundaries, message_bytes, message_seconds
from shoal.predict.cost.collectives.network import collective_seconds
from shoal.predict.cost.device_kinds import Alike, ByKind, Kinds, alike_of, views_of
from shoal.predict.cost.layout import Layout
from shoal.predict.cost.time.block import BlockCost, block_cost
from shoal.predict.cost.time.buckets import owned_by_rank, parameters_on_rank
from shoal.predict.cost.time.compute import operation_flop, operation_seconds, stream_seconds
from shoal.predict.cost.time.data_parallel import DataParallelCosts, ExchangeCost, Runs, StageWork, runs_of
from shoal.predict.cost.time.hosts import HostCosts, host_costs
from shoal.predict.cost.time.jitter import straggler_share
from shoal.predict.cost.time.least import Beside, Passes, least_end
from shoal.predict.cost.time.merges import Merge, merge_of
from shoal.predict.cost.time.offload import (
    Offload,
    gradient_sum_bytes,
    offload_of,
    require_host,
    stored_bytes,
    update_bytes,
)
from shoal.predict.cost.time.split import as_kept, kept_pieces, pieces_by_stage
from shoal.spec.cluster import Cluster
from shoal.spec.plan import Boundary, ByFields, Group, Groups, SettledPlan
from shoal.spec.plan.stages import Cost
from shoal.spec.workload import (
    Attention,
    Block,
    ModelShape,
    Parameters,
    Pass,
    Product,
    Workload,
    compilable_workload_of,
    workload_of,
)


def crowded_seconds(seconds: float, busy: Iterable[tuple[float, float]], ranks: int, cores: int) -> float:
    """Rescale the seconds of a simulated step whose ranks outnumber the cores.

    Args:
        seconds: Seconds of the step, simulated at the rate that each rank has while all ranks work.
        busy: Intervals in which ranks work; those of one rank do not overlap.
        ranks: Number of ranks that share the cores.
        cores: Number of cores, fewer than ranks.
    """
    changes = sorted(change for start, stop in busy for change in ((start, 1), (stop, -1)))
    total = reached = 0.0
    working = 0
    for moment, change in (*changes, (seconds, 0)):
        total += (moment - reached) * max(working, cores) / ranks
        reached, working = moment, working + change
    return total


def workload_on(cluster: Cluster, shape: ModelShape) -> Workload:
    """Return the Workload of a shape as Shoal trains it.

    On GPUs torch's kernels are compiled or run one by one, as the Plan says. On cores, torch's norm is
    several operators, which keep more.

    Args:
        cluster: The machines that it is trained on.
        shape: Shape of the model.
    """
    if cluster.cores or not shape.fused_passes:
        return workload_of(shape.replace(fused_passes=False))
    return compilable_workload_of(shape)


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


def works_by_stage(plan: SettledPlan, stages: Sequence[StageCost]) -> list[StageWork]:
    """Return the work of each stage of the pipeline, from that of each rank."""
    held = [iter(each.stages) for each in stages]
    return [next(held[rank]) for rank in (plan.placement if plan.pp > 1 else (0,))]


def backward_waited_for(plan: SettledPlan, work: StageWork) -> float:
    """Return the seconds of the part of a stage's backward that the stage before waits for."""
    return work.backward - work.weight if plan.has_halves else work.backward


_Held = tuple[Runs, ...]
"""The blocks of each stage of a rank."""


class Costs:
    """Computes the costs of a Workload on a Cluster under any Plan, and caches what Plans share.

    Args:
        workload: The work of the model that is trained.
        cluster: The machines that it runs on.
        hosts: The costs of its blocks; None to compute them.
    """

    def __init__(self, workload: Workload, cluster: Cluster, hosts: HostCosts | None = None) -> None:
        views = views_of(cluster)
        self.workload = workload
        self.cluster = cluster = views[0] if len(views) == 1 else cluster
        every = host_costs(workload, cluster) if hosts is None else (hosts,)
        self.hosts = every[0]
        self._by_kind: ByKind[Costs] | None = None
        if len(views) > 1:
            each = [Costs(workload, *of_kind) for of_kind in zip(views, every, strict=True)]
            self._by_kind = ByKind(Kinds(cluster), each, Costs._micro_batch)
        self._is_torch = any(piece.sums for piece in (*workload.layers[:1], workload.end))
        self._stages, self._updates = ByFields(self._stages_of), ByFields(self._update_of)
        self._held, self._rank, self._work = cache(self._held_by), cache(self._stage_cost), cache(StageWork)
        self._sends = cache(self._send_each)
        self._boundaries = cache(partial(alike_boundaries, cluster=self.cluster))
        self._exchange = [  # with buckets of a Plan's size; with these or smaller ones
            ByFields(DataParallelCosts(workload, cluster, self.block, bounds_smaller=each).of)
            for each in (False, True)
        ]

    def at(self, plan: SettledPlan, place: int) -> Costs:
        """Return the costs on the devices that a place along the pipeline waits for."""
        return self if self._by_kind is None else self._by_kind.at(plan, place)

    def all_at(self, plan: SettledPlan | None = None, place: int = 0) -> tuple[Costs, ...]:
        """Return the costs on each kind of device, of all or of those at a place along the pipeline."""
        return (self,) if self._by_kind is None else self._by_kind.all_at(plan, place)

    def alike(self, plan: SettledPlan, batch: int) -> list[Alike[Costs]]:
        """Return the groups of ranks that have equal devices and make equally many micro-batches."""
        return alike_of(self, self._by_kind, plan, batch)

    def paces(self, plan: SettledPlan) -> Sequence[float]:
        """Return, by place, how many times `piece_costs` a piece takes there; empty if devices are equal."""
        return () if self._by_kind is None else self._by_kind.paces(plan)

    def _micro_batch(self, layout: Layout) -> float:
        """Return the seconds of a micro-batch of all blocks."""
        return self.hosts.micro_batch(self.settled(layout))

    def least(self, plan: SettledPlan, batch: int, passes: float = 0.0) -> float:
        """Return a lower bound on the seconds of a step.

        Args:
            plan: The Plan.
            batch: Samples of the step.
            passes: A lower bound on the seconds until the slowest rank has done its forwards and backwards.
        """
        return max(each.costs._least(each.plan, each.batch, passes) for each in self.alike(plan, batch))

    def least_of_sizes(self, plan: SettledPlan, batch: int) -> float:
        """Return a lower bound on the seconds of a step, with buckets of the Plan's size or smaller ones."""
        alike = self.alike(plan, batch)
        return max(each.costs._least(each.plan, each.batch, smaller=True) for each in alike)

    def _least(self, plan: SettledPlan, batch: int, passes: float = 0.0, *, smaller: bool = False) -> float:
        count = plan.microbatches_of(batch)
        stages = self.stages(plan, count)
        works = works_by_stage(plan, stages)
        exchanges = self._exchanges(plan, works, smaller)
        gathered, before = [0.0] * plan.pp, []  # a rank gathers its stages' weights one after another
        held: list[list[ExchangeCost]] = [[] for _ in stages]
        for place, each in zip(plan.placement if plan.pp > 1 else (0,), exchanges, strict=True):
            before.append(gathered[place] + each.before)
            gathered[place] += each.gathered
            held[place].append(each)
        after = [each.after for each in exchanges]
        beside = [_beside(*each, count) for each in zip(stages, held, strict=True)] if plan.pp > 1 else ()
        timed = [each.passes for each in exchanges]
        end = least_end(plan, timed, self.sends(plan), count, before, after, beside)
        late = end * (1 + straggler_share(plan, self.cluster))
        end = max(late, passes + (min(after) if plan.pp > 1 else 0.0))
        return end + self.norm(plan) + self.update_of(plan, count)

    def _exchanges(self, plan: SettledPlan, works: Sequence[StageWork], smaller: bool) -> list[ExchangeCost]:
        """Return what gradients and weights add to each stage."""
        placement, has_halves = plan.placement if plan.pp > 1 else (0,), plan.has_halves
        stages = [(self.at(plan, place), work) for place, work in zip(placement, works, strict=True)]
        found = {each: each[0]._exchange[smaller](plan, each[1], has_halves) for each in set(stages)}
        return [found[each] for each in stages]

    def update_of(self, plan: SettledPlan, count: int) -> float:
        """Return the seconds of the slowest rank's optimizer, of its sums of gradients, and of its merges."""
        return self._updates(plan, count)

    def _update_of(self, plan: SettledPlan, count: int) -> float:
        ranks = enumerate(self.stages(plan, count))
        places = {(each.parameters, self.all_at(plan, place)): place for place, each in ranks}
        return max(
            self.after_at(plan, place, held, count) + self.at(plan, place).merge(plan, held, count).seconds
            for (held, _), place in places.items()
        )

    def after_at(self, plan: SettledPlan, place: int, parameters: Parameters, count: int) -> float:
        """Return the seconds of `after` on those devices at a place along the pipeline that take longest."""
        seconds = max(each.after(plan, parameters, count) for each in self.all_at(plan, place))
        return seconds + (self._offload(plan, place, count)[0].extra if plan.tiers.moved else 0.0)

    def file_waits(self, plan: SettledPlan, place: int, count: int) -> float:
        """Return the part of `after_at` in which ranks at a place along the pipeline wait for files."""
        return self._offload(plan, place, count)[0].waits if plan.tiers.moved else 0.0

    def offload(self, plan: SettledPlan, place: int, count: int) -> Offload:
        """Return the effect of the Plan's `offload` on the ranks at a place along the pipeline.

        Raises:
            ClusterError: A rate of the host is not known, or its memory is too small.
        """
        found, owned = self._offload(plan, place, count)
        require_host(plan, self.at(plan, place).cluster, owned, found.host_bytes)
        return found

    def _offload(self, plan: SettledPlan, place: int, count: int) -> tuple[Offload, float]:
        """Return the effect of the Plan's `offload`, and the elements that a rank owns."""
        stage, here = self.stages(plan, count)[place], self.at(plan, place)
        passes = stage.forward, stage.input + stage.weight
        owned, update = owned_by_rank(stage.parameters, plan), here.update(plan, stage.parameters)
        stages = self.ranges(plan, count)
        pieces = self._pieces(kept_pieces(self.workload, plan, stages))
        stored = stored_bytes(self.workload, plan, stages, pieces, here.settled(Layout.of(plan)), place)
        return offload_of(here.cluster, plan, owned, passes, count, update, stored), owned

    def least_of_passes(self, plan: SettledPlan, count: int) -> float:
        """Return a lower bound on the seconds of `count` micro-batches, for any sharding of the state."""
        works = works_by_stage(plan, self.stages(plan, count))
        unsharded = [Passes(each.forward, each.backward, backward_waited_for(plan, each)) for each in works]
        return least_end(plan, unsharded, self.sends(plan), count)

    def sends(self, plan: SettledPlan) -> list[float]:
        """Return the seconds of a message from each stage to the next; 0 where both are on one rank."""
        groups, placement = Groups.of_pipeline(plan), plan.placement if plan.pp > 1 else (0,)
        nbytes = message_bytes(Layout.of(plan), self.workload)
        return self._sends(nbytes, groups.pp, groups.stage, placement)

    def _send_each(self, nbytes: float, pp: Group, stage: Group, placement: tuple[int, ...]) -> list[float]:
        known = self._boundaries(pp, stage, placement)
        seconds = {each: message_seconds(nbytes, each, self.cluster) for each in set(known) if each}
        return [seconds[each] if each else 0.0 for each in known]

    def norm(self, plan: SettledPlan) -> float:
        """Return the seconds of the all-reduce of the squared norm of gradients."""
        return collective_seconds("all_reduce", 8, Groups.of(plan).parts, self.cluster)

    def block(self, block: Block, layout: Layout) -> BlockCost:
        """Return the cost of a block with waits for the host; where devices differ, of the longest."""
        if self._by_kind is not None:
            return self._by_kind.longest(layout).block(block, layout)
        return self.hosts.block(block, layout)

    def settled(self, layout: Layout) -> Layout:
        """Return the layout with compile=auto settled: the quicker of blocks and none for a micro-batch."""
        return self.hosts.settled(layout)

    def stages(self, plan: SettledPlan, count: int) -> tuple[StageCost, ...]:
        """Return, by rank along pp, the cost of its stages together for one micro-batch."""
        return self._stages(plan, count if plan.split == "cost" else 0)

    def _stages_of(self, plan: SettledPlan, count: int) -> tuple[StageCost, ...]:
        layout, ranges = Layout.of(plan), self.ranges(plan, count)
        placement = plan.placement if plan.pp > 1 else (0,)
        held = self._held(ranges, placement, kept_pieces(self.workload, plan, ranges))
        return tuple([self.at(plan, place)._rank(blocks, layout) for place, blocks in enumerate(held)])

    def piece_costs(self, layout: Layout) -> list[Cost]:
        """Return the cost of each block, for splitting stages; where devices differ, on the first of them."""
        if self._by_kind is not None:
            return self.all_at()[0].piece_costs(layout)
        costs = [self.block(piece, layout) for piece in self.workload.pieces]
        return [Cost(each.forward, each.backward) for each in costs]

    def blocks_of(self, plan: SettledPlan, count: int) -> list[Sequence[Block]]:
        """Return the blocks of each stage of the whole pipeline; one stage without a pipeline."""
        ranges = self.ranges(plan, count)
        pieces = self._pieces(kept_pieces(self.workload, plan, ranges))
        return [pieces[each.start : each.stop] for each in ranges]

    def ranges(self, plan: SettledPlan, count: int) -> tuple[range, ...]:
        """Return the pieces of each stage."""

        def costs() -> list[Cost]:
            return self.piece_costs(self.settled(Layout.of(plan)))

        return pieces_by_stage(self.workload, plan, count, costs, partial(self.paces, plan))

    def _pieces(self, kept: frozenset[int]) -> tuple[Block, ...]:
        """Return the pieces of the model, those that a Plan's recompute leaves out as kept."""
        pieces = self.workload.pieces
        return tuple([as_kept(each) if place in kept else each for place, each in enumerate(pieces)])

    def _held_by(
        self, ranges: tuple[range, ...], placement: tuple[int, ...], kept: frozenset[int]
    ) -> list[_Held]:
        """Return the blocks of each rank's stages."""
        held: list[list[Runs]] = [[] for _ in range(max(placement) + 1)]
        pieces = self._pieces(kept)
        for rank, each in zip(placement, ranges, strict=True):
            held[rank].append(runs_of(pieces[each.start : each.stop]))
        return [tuple(stages) for stages in held]

    def _stage_cost(self, held: _Held, layout: Layout) -> StageCost:
        works = []
        weight = tensor = context = expert = late = 0.0
        whole = divided = experts = 0
        for runs in held:
            forward = backward = made = 0.0
            stops = [0.0, 0.0]
            for block, number in runs:
                cost, parameters = self.block(block, layout), block.parameters
                forward += number * cost.forward
                backward += number * cost.backward
                made += number * cost.compute.weight
                stops[0] += number * (cost.forward - cost.compute.forward)
                stops[1] += number * (cost.backward - cost.compute.backward)
                tensor += number * sum(cost.tensor)
                context += number * sum(cost.context)
                expert += number * sum(cost.expert)
                late += number * sum(cost.late)
                whole += number * parameters.whole
                divided += number * parameters.divided
                experts += number * parameters.experts
            weight += made
            works.append(self._work(runs, forward, backward, made, (stops[0], stops[1])))
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

    def send(self, plan: SettledPlan, sender: int, receiver: int) -> float:
        """Return the seconds to send one micro-batch's hidden state to a neighbour along the pipeline.

        Args:
            plan: The Plan.
            sender, receiver: Places along the pipeline. All ranks of a stage send at once, each to its own
                neighbour; the slowest of these messages counts.
        """
        nbytes = message_bytes(Layout.of(plan), self.workload)
        return message_seconds(nbytes, Boundary.of(plan, sender, receiver), self.cluster)

    def after(self, plan: SettledPlan, parameters: Parameters, count: int) -> float:
        """Return the seconds of a step of `count` micro-batches in which only passes over parameters run.

        These are the optimizer's and those of sums of gradients, without what hides the waits for the host.
        """
        seconds = self.update(plan, parameters) + self.gradient_sums(plan, parameters, count)
        if self.workload.synchronises:
            return seconds
        waits = count * self.hosts.waits(Layout.of(plan)) / plan.pp
        return seconds - min(seconds, waits)

    def merge(self, plan: SettledPlan, parameters: Parameters, count: int) -> Merge:
        """Return a step's share of the merges of what workers changed; nothing if they do not."""
        if plan.exchange not in ("local", "server"):
            return Merge()
        works = [each.stages for each in self.stages(plan, count)]
        beside = count * min(sum(work.forward + work.backward for work in each) for each in works)
        return merge_of(plan, owned_by_rank(parameters, plan), beside, self.workload, self.cluster)

    def update(self, plan: SettledPlan, parameters: Parameters) -> float:
        """Return the seconds of the optimizer's passes over the rank's shard of these parameters."""
        return stream_seconds(self.cluster.device, update_bytes(plan, parameters, is_torch=self._is_torch), 4)

    def gradient_sums(self, plan: SettledPlan, parameters: Parameters, count: int) -> float:
        """Return the seconds in which torch adds the gradients of `count` micro-batches to sums in fp32."""
        nbytes = gradient_sum_bytes(plan, parameters, count, self.workload, is_torch=self._is_torch)
        return stream_seconds(self.cluster.device, nbytes, 0)


def _beside(stage: StageCost, exchanges: Sequence[ExchangeCost], count: int) -> Beside:
    """Return what slows the compute of a rank whose stages exchange so much."""
    first, *others = exchanges
    slowing = [first.beside_first, *(each.beside for each in others)]
    stops = count * sum(sum(work.stops) for work in stage.stages)
    return Beside(sum(each for each, _ in slowing), max(most for _, most in slowing), stops)


def compute_parts(costs: Costs, blocks: Sequence[Block], layout: Layout) -> Mapping[str, float]:
    """Return the seconds of compute of these blocks for one micro-batch, by the parts above.

    Args:
        costs: Costs of the blocks' workload.
        blocks: Blocks of one rank.
        layout: How they are laid over ranks.
    """
    parts: defaultdict[str, float] = defaultdict(float)
    for block, number in Counter(blocks).items():
        for name, seconds in _of_block(costs, block, layout).items():
            parts[name] += number * seconds
    return parts


def _of_block(costs: Costs, block: Block, layout: Layout) -> Mapping[str, float]:
    workload, cluster = costs.workload, costs.cluster
    device, made = cluster.device, block.under(costs.settled(layout).compile)
    is_layer = block is not workload.embedding and block is not workload.end
    laid = layout if is_layer or layout.precision != "fp8" else layout._replace(precision="bf16")
    parts: defaultdict[str, float] = defaultdict(float)
    for operation in made.operations:
        seconds = sum(operation_seconds(operation, device, laid))
        if isinstance(operation, Pass):
            parts["passes"] += seconds
            continue
        ideal = operation_flop(operation, laid) / device.flops(laid.precision)
        parts["ideal"] += ideal
        if isinstance(operation, Product):
            parts["products"] += seconds - ideal
        elif isinstance(operation, Attention):
            parts["attention"] += seconds - ideal
    plain = costs.settled(layout)._replace(recompute="none")
    alone = block_cost(block, workload.hidden, workload.length, cluster, plain, is_layer=is_layer).compute
    again = block_cost(
        block, workload.hidden, workload.length, cluster, costs.settled(layout), is_layer=is_layer
    ).compute
    parts["passes"] += sum(alone) - sum(parts.values())  # casts to 8 bits
    parts["recompute"] = sum(again) - sum(alone)
    parts["host"] = max(0.0, sum(costs.block(block, layout).compute) - sum(again))
    return parts
