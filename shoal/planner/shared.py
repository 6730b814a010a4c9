"""Values that the Plans of a Space share: costs, memory, and bounds on both; each is computed once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from shoal.cluster import Cluster
from shoal.cost import Costs, Layout, Memories, RankMemory
from shoal.cost.time import BlockCost
from shoal.plan import SettledPlan, element_bytes
from shoal.plan.schedules import kind_of
from shoal.planner.balance import balanced_split
from shoal.planner.bucket import usual_bucket
from shoal.planner.data_parallel_bound import LeastDataParallel, Passes
from shoal.planner.memory_bound import LeastMemory, Share, StateBytes
from shoal.planner.space import Degrees, HybridSharding, Space, Variant
from shoal.simulate import played_passes, played_seconds
from shoal.workload import Workload

__all__ = ["Shared", "Work"]


class Work(NamedTuple):
    """Seconds of a micro-batch on the ranks of one replica, forward and backward.

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
            costs = [each.compute for each in self._blocks(layout)]
            work = self._work([Passes(each.forward, each.backward) for each in costs])
            self._computes[layout] = work
        return work

    def work(self, layout: Layout) -> Work:
        """Return the times of blocks."""
        work = self._works.get(layout)
        if work is None:
            work = self._work([Passes(each.forward, each.backward) for each in self._blocks(layout)])
            self._works[layout] = work
        return work

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
            dense, experts, _ = share
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
        work = self.work(variant.layout)
        placement = kind_of(variant.schedule).placement(variant.degrees.pp, variant.virtual)
        return balanced_split(work.embedding, work.layer, work.end, layers, placement)

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

    def plan(self, variant: Variant, sharding: HybridSharding, split: Sequence[int]) -> SettledPlan:
        """Return the Plan with these layers in its stages, and with buckets that suit the links."""
        key = variant.degrees, sharding
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = usual_bucket(self.space.cluster, variant.plan(sharding))
        if len(split) == 1:
            return variant.plan(sharding, bucket=bucket)
        return variant.plan(sharding, _split_text(tuple(split)), bucket)

    def _blocks(self, layout: Layout) -> list[BlockCost]:
        """Return the costs of each kind of block: the embedding, layers, the end."""
        return [self.costs.block(block, layout) for block, _ in self._kinds]

    def _work(self, each: Sequence[Passes]) -> Work:
        total = sum(sum(passes) * number for passes, (_, number) in zip(each, self._kinds, strict=True))
        first, *layers, last = each
        mean = (total - sum(first) - sum(last)) / len(self.space.workload.layers)
        least = Passes(min(layer.forward for layer in layers), min(layer.backward for layer in layers))
        return Work(total, sum(first), mean, sum(last), least)


@lru_cache(maxsize=1 << 12)
def _split_text(split: tuple[int, ...]) -> str:
    """Return a split as a Plan writes it."""
    return "count" if len(set(split)) == 1 else "-".join(map(str, split))
