"""Values that the Plans of a Space share: costs, memory, and bounds on both; each is computed once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache, partial
from typing import TypeVar

from shoal.cluster import Cluster
from shoal.cost import Costs, Memories
from shoal.plan import OFFLOADED, UNSHARDED, ByFields, SettledPlan
from shoal.plan.schedules import kind_of
from shoal.planner.balance import balanced_split
from shoal.planner.bucket import usual_bucket
from shoal.planner.memory_bound import LeastMemory, Share
from shoal.planner.sharding_bound import LeastStep, Shardings
from shoal.planner.space import HybridSharding, Space, Variant
from shoal.planner.stage_bound import Stages, stages_of
from shoal.planner.work import Works
from shoal.simulate import played_passes, played_seconds
from shoal.workload import Workload

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
