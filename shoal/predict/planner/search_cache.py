"""Values that the Plans of a Space share: costs, memory, and bounds on both; each is computed once.

A fast split of equal layers, with unlike ends, into stages: the planner cuts thousands of Plans with it.

If all layers cost the same, a split is a number of layers for each rank, and in the best split the most
loaded rank has the least load. With the load M of that rank, a rank whose ends (embedding, head) cost x takes
up to floor((M - x) / c) layers of cost c, which differs between ranks if their devices do. The least M at
which these numbers reach all layers is found by going up from the mean load, over the loads x + k c that some
rank can have. If the numbers exceed the layers, the first ranks take fewer. A rank shares its layers evenly
among its stages.

`shoal.spec.plan.stages.split_by_cost` does this for pieces that are all unlike, in up to seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache, partial
from typing import TypeVar

from shoal.predict.cost import Costs, Memories
from shoal.predict.planner.memory_bound import LeastMemory, Share
from shoal.predict.planner.micro_batch_time import Works
from shoal.predict.planner.sharding_bound import LeastStep, Shardings
from shoal.predict.planner.space import HybridSharding, Space, Variant, usual_bucket
from shoal.predict.planner.stage_bound import Stages, stages_of
from shoal.predict.simulate import played_passes, played_seconds
from shoal.spec.cluster import Cluster
from shoal.spec.plan import OFFLOADED, UNSHARDED, ByFields, SettledPlan
from shoal.spec.plan.schedules import kind_of
from shoal.spec.workload import Workload


def balanced_split(
    embedding: float,
    layer: float,
    end: float,
    layers: int,
    placement: Sequence[int],
    paces: Sequence[float] = (),
) -> tuple[int, ...]:
    """Return the number of layers of each stage; the first also has the embedding, and the last the end.

    Args:
        embedding, layer, end: Cost of the embedding, of a layer and of the end.
        layers: Number of layers; at least the number of stages.
        placement: The rank of each stage.
        paces: By rank, how many times these costs it takes; empty if all take as long.
    """
    return _balanced(embedding, layer, end, layers, tuple(placement), tuple(paces))


@lru_cache(maxsize=1 << 14)
def _balanced(
    embedding: float,
    layer: float,
    end: float,
    layers: int,
    placement: tuple[int, ...],
    paces: tuple[float, ...],
) -> tuple[int, ...]:
    least, first, last = _inner_stages(placement)
    extras = [0.0] * len(least)
    extras[first] += embedding / layer
    extras[last] += end / layer
    counts = _counts(extras, least, layers, paces or (1.0,) * len(least))
    return _shared(counts, placement)


@lru_cache(maxsize=1 << 10)
def _inner_stages(placement: tuple[int, ...]) -> tuple[list[int], int, int]:
    """Return, by rank, its stages except the first and the last of all, and the ranks that have these two."""
    least = [0] * (max(placement) + 1)
    for rank in placement[1:-1]:
        least[rank] += 1
    return least, placement[0], placement[-1]


def _counts(
    extras: Sequence[float], least: Sequence[int], layers: int, paces: Sequence[float]
) -> tuple[int, ...]:
    """Return the layers of each rank; `extras` are in units of layers."""
    ranks = list(zip(extras, least, paces, strict=True))
    alike = Counter(ranks)  # most ranks of a long pipeline are equal
    load = (layers + sum(extras)) / sum([1 / pace for pace in paces])
    while True:
        counts = {rank: max(rank[1], math.floor(load / rank[2] - rank[0] + 1e-9)) for rank in alike}
        spare = sum([counts[rank] * number for rank, number in alike.items()]) - layers
        if spare >= 0:
            break
        load = min([(rank[0] + count + 1) * rank[2] for rank, count in counts.items()])
    found = [counts[rank] for rank in ranks]
    while spare:  # when one rank reaches a load, many may take one more layer
        for rank, low in enumerate(least):
            if spare and found[rank] > low:
                found[rank] -= 1
                spare -= 1
    return tuple(found)


@lru_cache(maxsize=1 << 14)
def _shared(counts: tuple[int, ...], placement: tuple[int, ...]) -> tuple[int, ...]:
    """Return, by stage, its share of its rank's layers; inner stages get the remainder first."""
    held: dict[int, list[int]] = {}
    for stage, rank in enumerate(placement):
        held.setdefault(rank, []).append(stage)
    split = [0] * len(placement)
    last = len(placement) - 1
    for rank, stages in held.items():
        even, more = divmod(counts[rank], len(stages))
        inner = sorted(stages, key=lambda stage: stage in (0, last))
        for position, stage in enumerate(inner):
            split[stage] = even + (position < more)
    return tuple(split)


R = TypeVar("R")


class Shared:
    """Costs, memory and bounds of a Workload on all devices of a Cluster, for one batch.

    Args:
        workload: The training.
        cluster: The machines that it runs on.
        batch: Samples of a step.
        least_memory: Bounds for this Workload on devices with equal memory, to share; None to compute them.
        precision: The precision of all Plans; None for the device's best of 16 bits or more.
        offload: What all Plans keep outside of the devices.
        resident: What Plans without `offload` share; None if these are such Plans.

    Attributes:
        space: The legal Plans.
        costs, memories: Costs of steps, and memory of ranks.
        least_memory: Lower bounds on memory.
        works: Times of blocks.
        shardings: Gives the shardings of Plans with these Degrees, with bounds.
        fullest: Gives the memory of a Plan's fullest rank.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        batch: int,
        least_memory: LeastMemory | None = None,
        precision: str | None = None,
        offload: str = OFFLOADED,
        resident: Shared | None = None,
    ) -> None:
        self.space = space = Space(workload, cluster, batch, asked=precision, offload=offload)
        self.costs: Costs = Costs(workload, cluster) if resident is None else resident.costs
        self.memories: Memories = (
            Memories(workload, cluster, self.costs) if resident is None else resident.memories
        )
        self.works: Works = Works(self.costs) if resident is None else resident.works
        self.least_memory = (
            LeastMemory(workload, cluster, space.tiers) if least_memory is None else least_memory
        )
        self._least_step = LeastStep(self.space, self.costs, self.least_memory)
        self.shardings = cache(partial(Shardings, self._least_step))
        self._bucket = ByFields(partial(usual_bucket, cluster))
        self.fullest = cache(partial(self.memories.fullest, batch=batch))
        self._played: dict[SettledPlan, float] = {}
        self._known: dict[SettledPlan, float] = {}
        self._passes = ByFields(partial(played_passes, self.costs))

    @property
    def late(self) -> float:
        """One more than the share of the passes that ranks wait for the slowest."""
        return self._least_step.late

    def stages(self, variant: Variant, split: tuple[int, ...]) -> Stages:
        """Return the stages of a cut model, with their least seconds."""
        numbers = self._least_step.data_parallel.numbers_of(split)
        works, layout = self.works, variant.layout
        return stages_of(variant, split, numbers, works.sums(layout), works.of(layout).least)

    def split(self, variant: Variant) -> tuple[int, ...]:
        """Return the layers of each stage, split by the costs of blocks."""
        layers = len(self.space.workload.layers)
        if variant.degrees.pp == 1:
            return (layers,)
        work = self.works.on_first(variant.layout)
        paces = tuple[float, ...]()
        if self.space.cluster.parts:
            paces = tuple(self.costs.paces(variant.plan(HybridSharding(UNSHARDED, 1))))
        placement = kind_of(variant.schedule).placement(variant.degrees.pp, variant.virtual)
        return balanced_split(work.embedding, work.layer, work.end, layers, placement, paces)

    def shares(self, plan: SettledPlan) -> list[Share]:
        """Return the shares of the ranks of an unsharded Plan that may be fullest."""
        return self.least_memory.shares(self.memories.beside_states(plan, self.space.batch))

    def played(self, plan: SettledPlan) -> float:
        """Return the seconds of a step under a Plan, played; the Plan is known from now on."""
        found = self._known[plan] = self.seconds(plan)
        return found

    def seconds(self, plan: SettledPlan) -> float:
        """Return the seconds of a step under a Plan, played."""
        found = self._played.get(plan)
        if found is None:
            found = self._played[plan] = played_seconds(self.costs, plan, self.space.batch)
        return found

    def learn(self, played: Mapping[SettledPlan, float]) -> None:
        """Add Plans that were played elsewhere."""
        self._known.update(played)
        self._played.update(played)

    def noting(self, work: Callable[[], R]) -> tuple[R, Mapping[SettledPlan, float]]:
        """Return what some work gives, and the Plans that it played, which do not become known here."""
        before, self._known = self._known, {}
        try:
            return work(), self._known
        finally:
            self._known = before

    def played_passes(self, plan: SettledPlan) -> float:
        """Return the seconds of a Plan's forwards and backwards, played; 0 without a pipeline."""
        if plan.pp == 1:
            return 0.0
        return self._passes(plan, plan.microbatches_of(self.space.batch))

    @property
    def known(self) -> Mapping[SettledPlan, float]:
        """The Plans that were played, with their seconds."""
        return self._known

    def plan(
        self, variant: Variant, sharding: HybridSharding, split: Sequence[int], bucket: int | None = None
    ) -> SettledPlan:
        """Return the Plan with these layers in its stages; buckets that are not given suit the links."""
        text = "cost" if len(split) == 1 else _split_text(tuple(split))
        if bucket is None:
            bucket = self._bucket(variant.plan(sharding))
        return variant.plan(sharding, text, bucket, self.space.offload_under(sharding.kind))


@lru_cache(maxsize=1 << 12)
def _split_text(split: tuple[int, ...]) -> str:
    """Return a split as a Plan writes it."""
    return "count" if len(set(split)) == 1 else "-".join(map(str, split))
