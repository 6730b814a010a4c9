"""Values that the Plans of a Space share: costs, memory, and bounds on both; each is computed once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from shoal.cluster import Cluster
from shoal.cost import Costs, Kinds, Layout, Memories, RankMemory
from shoal.cost.time import BlockCost
from shoal.plan import UNSHARDED, SettledPlan, element_bytes
from shoal.plan.schedules import kind_of
from shoal.planner.balance import balanced_split
from shoal.planner.bucket import usual_bucket
from shoal.planner.data_parallel_bound import LeastDataParallel, Passes
from shoal.planner.memory_bound import LeastMemory, Share, StateBytes
from shoal.planner.space import Degrees, HybridSharding, Space, Variant
from shoal.simulate import played_passes, played_seconds
from shoal.workload import Workload

__all__ = ["Shared", "Work"]

_PassesOf = Callable[[BlockCost], Passes]


class Work(NamedTuple):
    """Seconds of a micro-batch on the ranks of one replica, forward and backward.

    Where devices differ, each block counts on those that are quickest with it: these are lower bounds.

    Attributes:
        total: Seconds of all blocks.
        embedding: Seconds of the embedding.
        layer: Mean seconds of a layer.
        end: Seconds of the end.
        least: Seconds of the quickest layer.
    """

    total: float
    embedding: float
    layer: float
    end: float
    least: Passes


class Shared:
    """Costs, memory and bounds of a Workload on all devices of a Cluster, for one batch.

    Args:
        workload: The training.
        cluster: The machines that it runs on.
        batch: Samples of a step.
        least_memory: Bounds for this Workload on devices with equal memory, to share; None to compute them.
        precision: The precision of all Plans; None for the device's best of 16 bits or more.

    Attributes:
        space: The legal Plans.
        costs, memories: Costs of steps, and memory of ranks.
        least_memory, least_data_parallel: Lower bounds on memory, and on the time of data-parallel
            communication.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        batch: int,
        least_memory: LeastMemory | None = None,
        precision: str | None = None,
    ) -> None:
        self.space = Space(workload, cluster, batch, asked=precision)
        self.costs = Costs(workload, cluster)
        self.memories = Memories(workload, cluster, self.costs)
        self.least_memory = LeastMemory(workload, cluster) if least_memory is None else least_memory
        self.least_data_parallel = LeastDataParallel(workload, cluster, element_bytes(self.space.precision))
        self._kinds = tuple(Counter(workload.pieces).items())
        self._kinds_of_devices = Kinds(cluster)
        self._ranks: dict[tuple[int, Layout, bool], float] = {}
        self._computes: dict[Layout, Work] = {}
        self._works: dict[Layout, Work] = {}
        self._states: dict[Degrees, Sequence[tuple[HybridSharding, StateBytes]]] = {}
        self._buckets: dict[tuple[Degrees, HybridSharding], int] = {}
        self._fullest: dict[SettledPlan, RankMemory] = {}
        self._played: dict[SettledPlan, float] = {}
        self._passes: dict[tuple[object, ...], float] = {}

    def compute(self, layout: Layout) -> Work:
        """Return the times of blocks without the communication within them."""
        work = self._computes.get(layout)
        if work is None:
            work = self._computes[layout] = self._work(_least(self._passes_of(layout, _compute)))
        return work

    def work(self, layout: Layout) -> Work:
        """Return the times of blocks."""
        work = self._works.get(layout)
        if work is None:
            work = self._works[layout] = self._work(_least(self._passes_of(layout, _whole)))
        return work

    def ranks(self, degrees: Degrees, layout: Layout, *, only_compute: bool) -> float:
        """Return how many ranks of the quickest devices the places along the pipeline make, at most.

        Some place takes at least the total of `work` or `compute` over this number, however the model is cut.
        Let r be the least of the times of one kind's blocks over those of the quickest. A place of this kind
        that has x seconds of work takes r x or longer; so if all take T, the total is at most the sum of T /
        r. Without a pipeline the place has all blocks.
        """
        if self._kinds_of_devices.number == 1:
            return degrees.pp
        key = degrees.pp, layout, only_compute
        found = self._ranks.get(key)
        if found is None:
            found = self._ranks[key] = self._ranks_of(
                degrees.pp, layout, _compute if only_compute else _whole
            )
        return found

    def _ranks_of(self, pp: int, layout: Layout, passes: _PassesOf) -> float:
        each = self._passes_of(layout, passes)
        least = [sum(block) for block in _least(each)]
        ratios = [
            [sum(block) / quickest for block, quickest in zip(kind, least, strict=True) if quickest]
            for kind in each
        ]
        ranks = self.space.cluster.devices
        places = self._kinds_of_devices.of_pipeline(pp, ranks // pp, ranks)
        if pp > 1:
            return sum(1 / min(min(ratios[kind]) for kind in place) for place in places)
        totals = [self._total(kind) for kind in each]
        return self._total(_least(each)) / max(totals[kind] for kind in places[0])

    def states(self, degrees: Degrees) -> Sequence[tuple[HybridSharding, StateBytes]]:
        """Return the shardings, each with the bytes of a parameter's states on a rank."""
        found = self._states.get(degrees)
        if found is None:
            states, precision = self.least_memory.states, self.space.precision
            found = [(each, states(degrees, each, precision)) for each in self.space.shardings(degrees)]
            self._states[degrees] = found
        return found

    def fitting(self, degrees: Degrees, shares: Sequence[Share], room: float) -> list[HybridSharding]:
        """Return the shardings under which ranks with these shares may fit."""
        fitting = self.states(degrees)
        for share in shares:
            dense, experts, *_ = share
            left = self.least_memory.for_states(share, room)
            fitting = [each for each in fitting if dense * each[1].dense + experts * each[1].experts <= left]
        return [sharding for sharding, _ in fitting]

    def exchanging(self, degrees: Degrees, shardings: Sequence[HybridSharding], work: Work) -> float:
        """Return a lower bound on some rank's seconds for a micro-batch, over these shardings.

        Return 0 if one of them communicates nothing in a micro-batch: then the times of blocks bound better.
        """
        if not all(each.kind.communicates_each_micro_batch for each in shardings):
            return 0.0
        least = self.least_data_parallel.of_micro_batch
        return min([least(degrees, sharding, work.least) for sharding in shardings])

    def split(self, variant: Variant) -> tuple[int, ...]:
        """Return the layers of each stage, split by the costs of blocks."""
        layers = len(self.space.workload.layers)
        if variant.degrees.pp == 1:
            return (layers,)
        if self._kinds_of_devices.number == 1:
            work, paces = self.work(variant.layout), tuple[float, ...]()
        else:
            work = self._work(self._passes_of(variant.layout, _whole)[0])
            paces = tuple(self.costs.paces(variant.plan(HybridSharding(UNSHARDED, 1))))
        placement = kind_of(variant.schedule).placement(variant.degrees.pp, variant.virtual)
        return balanced_split(work.embedding, work.layer, work.end, layers, placement, paces)

    def shares(self, plan: SettledPlan) -> list[Share]:
        """Return the shares of the ranks of an unsharded Plan that may be fullest."""
        return self.least_memory.shares(self.memories.beside_states(plan, self.space.batch))

    def fullest(self, plan: SettledPlan) -> RankMemory:
        """Return the memory of a Plan's fullest rank."""
        found = self._fullest.get(plan)
        if found is None:
            found = self._fullest[plan] = self.memories.fullest(plan, self.space.batch)
        return found

    def played(self, plan: SettledPlan) -> float:
        """Return the seconds of a step under a Plan, played."""
        found = self._played.get(plan)
        if found is None:
            found = self._played[plan] = played_seconds(self.costs, plan, self.space.batch)
        return found

    def played_passes(self, plan: SettledPlan) -> float:
        """Return the seconds of a Plan's forwards and backwards, played; 0 without a pipeline."""
        if plan.pp == 1:
            return 0.0
        key = Layout.of(plan), plan.dp, plan.pp, plan.schedule, plan.virtual, plan.split, plan.order
        found = self._passes.get(key)
        if found is None:
            count = plan.microbatches_of(self.space.batch)
            found = self._passes[key] = played_passes(self.costs, plan, count)
        return found

    @property
    def known(self) -> Mapping[SettledPlan, float]:
        """The Plans that were played, with their seconds."""
        return self._played

    def plan(
        self, variant: Variant, sharding: HybridSharding, split: Sequence[int], bucket: int | None = None
    ) -> SettledPlan:
        """Return the Plan with these layers in its stages; buckets that are not given suit the links."""
        text = "cost" if len(split) == 1 else _split_text(tuple(split))
        if bucket is None:
            key = variant.degrees, sharding
            bucket = self._buckets.get(key)
            if bucket is None:
                bucket = self._buckets[key] = usual_bucket(self.space.cluster, variant.plan(sharding))
        return variant.plan(sharding, text, bucket)

    def _passes_of(self, layout: Layout, passes: _PassesOf) -> list[list[Passes]]:
        """Return, by kind of device, the times of each kind of block: the embedding, layers, the end."""
        return [
            [passes(costs.block(block, layout)) for block, _ in self._kinds] for costs in self.costs.all_at()
        ]

    def _total(self, each: Sequence[Passes]) -> float:
        return sum(sum(passes) * number for passes, (_, number) in zip(each, self._kinds, strict=True))

    def _work(self, each: Sequence[Passes]) -> Work:
        total = self._total(each)
        first, *layers, last = each
        mean = (total - sum(first) - sum(last)) / len(self.space.workload.layers)
        least = Passes(min(layer.forward for layer in layers), min(layer.backward for layer in layers))
        return Work(total, sum(first), mean, sum(last), least)


def _compute(cost: BlockCost) -> Passes:
    """Return the times of a block without the communication within it."""
    return Passes(cost.compute.forward, cost.compute.backward)


def _whole(cost: BlockCost) -> Passes:
    """Return the times of a block."""
    return Passes(cost.forward, cost.backward)


def _least(each: Sequence[list[Passes]]) -> list[Passes]:
    """Return the least times of each block over all kinds of devices."""
    if len(each) == 1:
        return each[0]
    return [
        Passes(min(one.forward for one in block), min(one.backward for one in block))
        for block in zip(*each, strict=True)
    ]


@lru_cache(maxsize=1 << 12)
def _split_text(split: tuple[int, ...]) -> str:
    """Return a split as a Plan writes it."""
    return "count" if len(set(split)) == 1 else "-".join(map(str, split))
