"""The Plans of a Space as a tree, of which a search makes what it looks at.

    portion     degrees and a micro-batch, with the least that blocks compute
    laid        the same with a layout of blocks, with what these cost, communication within them too
    variant     a Plan but for its sharding
    cut         the same, with the layers of its stages
    sharded     a Plan, with what its pipeline costs
    timed       a Plan, with its predicted step

Every branch has the seconds that a step takes at least, and the bytes that a rank has at least, for all Plans
that grow from it; the seconds of a timed Plan are those of its step. Branches are kept: searches of one tree
share what they have looked at. Tests hold the bounds against every Plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

from shoal.cluster import Cluster
from shoal.cost.exchange import runs_of
from shoal.cost.layout import Layout
from shoal.cost.memory import Memories, RankMemory
from shoal.cost.step import Costs, StepCost, exposed_sends
from shoal.plan import Plan
from shoal.plan.schedules import placement_of
from shoal.planner.balance import balanced_split
from shoal.planner.bound import least_seconds
from shoal.planner.bucket import best_bucket, usual_bucket
from shoal.planner.room import LeastMemory
from shoal.planner.space import Degrees, Sharding, Space, Variant, leanest_sharding
from shoal.workload import Workload

__all__ = ["Branch", "Timed", "Tree"]


class Branch(Protocol):
    """Plans that are told apart by what grows from it."""

    @property
    def degrees(self) -> Degrees:
        """Of all these Plans."""

    @property
    def memory(self) -> float:
        """Bytes that a rank has at least."""

    @property
    def seconds(self) -> float:
        """That a step takes at least."""

    @property
    def branches(self) -> Sequence[Branch]:
        """That grow from it; none from a timed Plan."""


class Tree:
    """All legal Plans of a Workload on all devices of a Cluster, for one batch.

    Args:
        workload: What is trained.
        cluster: Where.
        batch: Samples of a step.
    """

    def __init__(self, workload: Workload, cluster: Cluster, batch: int) -> None:
        self.workload = workload
        self.cluster = cluster
        self.batch = batch
        self.space = Space(workload, cluster, batch)
        self.costs = Costs(workload, cluster)
        self.memories = Memories(workload, cluster, self.costs)
        self.least_memory = LeastMemory(workload, cluster)
        self._kinds = runs_of(workload.pieces)
        self._works: dict[Layout, Work] = {}
        self._buckets: dict[tuple[Degrees, Sharding], int] = {}
        self._computes: dict[Layout, float] = {}

    @cached_property
    def first(self) -> dict[Degrees, Sequence[Branch]]:
        """By degrees, the branches that everything grows from."""
        found: dict[Degrees, Sequence[Branch]] = {}
        for degrees in self.space.degrees():
            portions = self.space.microbatches(degrees)
            found[degrees] = [_Portion(self, degrees, microbatch, count) for microbatch, count in portions]
        return found

    def compute(self, layout: Layout) -> float:
        """Seconds of a micro-batch on the ranks of one replica, without communication within blocks."""
        seconds = self._computes.get(layout)
        if seconds is None:
            costs = [(self.costs.block(block, layout).compute, number) for block, number in self._kinds]
            seconds = sum((cost.forward + cost.backward) * number for cost, number in costs)
            self._computes[layout] = seconds
        return seconds

    def work(self, layout: Layout) -> Work:
        """What blocks take on the ranks of one replica."""
        work = self._works.get(layout)
        if work is None:
            costs = [(self.costs.block(block, layout), number) for block, number in self._kinds]
            seconds = [(cost.forward + cost.backward, number) for cost, number in costs]
            total = sum(each * number for each, number in seconds)
            first, last = seconds[0][0], seconds[-1][0]
            work = Work(total, first, (total - first - last) / len(self.workload.layers), last)
            self._works[layout] = work
        return work

    def split(self, variant: Variant) -> tuple[int, ...]:
        """Layers of each stage, by what blocks cost."""
        layers = len(self.workload.layers)
        if variant.degrees.pp == 1:
            return (layers,)
        _, embedding, layer, end = self.work(variant.layout)
        placement = placement_of(variant.schedule, variant.degrees.pp, variant.virtual)
        return balanced_split(embedding, layer, end, layers, placement)

    def plan(self, variant: Variant, sharding: Sharding, split: Sequence[int]) -> Plan:
        """The Plan with these layers in its stages, and buckets that suit the links."""
        key = variant.degrees, sharding
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = usual_bucket(self.cluster, variant.plan(sharding))
        if len(split) == 1:
            return variant.plan(sharding, bucket=bucket)
        counts = "count" if len(set(split)) == 1 else "-".join(map(str, split))
        return variant.plan(sharding, counts, bucket)


class Work(NamedTuple):
    """Seconds of a micro-batch, forward and backward."""

    total: float
    embedding: float
    layer: float
    end: float


class _Portion:
    """Degrees and a micro-batch."""

    def __init__(self, tree: Tree, degrees: Degrees, microbatch: int, count: int) -> None:
        self.degrees = degrees
        self._tree = tree
        self._microbatch = microbatch
        self._count = count

    @cached_property
    def memory(self) -> float:
        """With the most recomputing and sharding, on the rank that has most layers."""
        layout = self._tree.space.layout(self.degrees, self._microbatch, recompute="full")
        return self._tree.least_memory.of_degrees(self.degrees, layout)

    @cached_property
    def seconds(self) -> float:
        """Without recomputing, and with the schedule that leaves least of the bubble."""
        space, pp = self._tree.space, self.degrees.pp
        work = self._tree.compute(space.layout(self.degrees, self._microbatch, recompute="none"))
        return min(
            least_seconds(pp, self._count, schedule, virtual, work)
            for schedule, virtual in space.schedules(pp, self._count)
        )

    @cached_property
    def branches(self) -> Sequence[Branch]:
        layouts = self._tree.space.layouts(self.degrees, self._microbatch)
        return [_Laid(self._tree, self.degrees, layout, self._count) for layout in layouts]


class _Laid:
    """Degrees, and a layout of blocks."""

    def __init__(self, tree: Tree, degrees: Degrees, layout: Layout, count: int) -> None:
        self.degrees = degrees
        self.memory = tree.least_memory.of_degrees(degrees, layout)
        self._tree = tree
        self._layout = layout
        self._count = count

    @cached_property
    def seconds(self) -> float:
        return min(seconds for seconds, _, _ in self._schedules)

    @cached_property
    def branches(self) -> Sequence[Branch]:
        return [
            _Unsharded(
                self._tree,
                Variant(self.degrees, self._layout, self._count, schedule, virtual),
                self.memory,
                seconds,
            )
            for seconds, schedule, virtual in self._schedules
        ]

    @cached_property
    def _schedules(self) -> Sequence[tuple[float, str, int]]:
        """With the seconds that a step takes at least."""
        tree, count, pp = self._tree, self._count, self.degrees.pp
        work = tree.work(self._layout).total
        if pp == 1:
            return [(least_seconds(1, count, "1f1b", 1, work), "1f1b", 1)]
        each = tree.costs.send_apart(self._layout, self.degrees.dp * self.degrees.cp * self.degrees.tp)
        return [
            (
                least_seconds(pp, count, schedule, virtual, work) + each * exposed_sends(pp, count, virtual),
                schedule,
                virtual,
            )
            for schedule, virtual in tree.space.schedules(pp, count)
        ]


class _Unsharded:
    """A variant."""

    def __init__(self, tree: Tree, variant: Variant, memory: float, seconds: float) -> None:
        self.degrees = variant.degrees
        self.memory = memory
        self.seconds = seconds
        self._tree = tree
        self._variant = variant

    @cached_property
    def branches(self) -> Sequence[Branch]:
        return [_Cut(self._tree, self._variant, self.memory, self.seconds)]


class _Cut:
    """A variant whose stages are known, so that what they hold is."""

    def __init__(self, tree: Tree, variant: Variant, memory: float, seconds: float) -> None:
        self.degrees = variant.degrees
        self.seconds = seconds
        self._tree = tree
        self._variant = variant
        self._counts = tree.split(variant)
        leanest = leanest_sharding(self.degrees)
        self.memory = max(memory, tree.least_memory.of(variant, leanest, self._counts))

    @cached_property
    def branches(self) -> Sequence[Branch]:
        tree, variant, counts = self._tree, self._variant, self._counts
        shardings = tree.space.shardings(self.degrees)
        seconds = tree.costs.pipeline(tree.plan(variant, shardings[0], counts), variant.microbatches).total
        memories = [tree.least_memory.of(variant, sharding, counts) for sharding in shardings]
        return [
            _Sharded(tree, variant, sharding, counts, max(self.memory, memory), seconds)
            for sharding, memory in zip(shardings, memories, strict=True)
        ]


class _Sharded:
    """A Plan that is not timed."""

    def __init__(
        self,
        tree: Tree,
        variant: Variant,
        sharding: Sharding,
        counts: Sequence[int],
        memory: float,
        seconds: float,
    ) -> None:
        self.degrees = variant.degrees
        self.memory = memory
        self.seconds = seconds
        self._tree = tree
        self._variant = variant
        self._sharding = sharding
        self._counts = counts

    @cached_property
    def branches(self) -> Sequence[Branch]:
        plan = self._tree.plan(self._variant, self._sharding, self._counts)
        return [Timed(self._tree, self.degrees, self.memory, plan)]


class Timed:
    """A Plan whose step was predicted.

    Attributes:
        degrees, memory: As of a Branch.
        plan: The Plan.
        cost: Of its step.
    """

    branches: Sequence[Branch] = ()

    def __init__(self, tree: Tree, degrees: Degrees, memory: float, plan: Plan) -> None:
        self.degrees = degrees
        self.memory = memory
        self.plan = plan
        self.cost: StepCost = tree.costs.step(plan, tree.batch)
        self._tree = tree

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.cost.seconds

    @cached_property
    def bucketed(self) -> Sequence[tuple[Plan, RankMemory]]:
        """With the best size of its buckets, and with the usual one, and the memory that each takes."""
        tree = self._tree
        sizes = dict.fromkeys((best_bucket(tree.costs, self.plan, tree.batch), self.plan.bucket))
        plans = [self.plan.replace(bucket=size) for size in sizes]
        return [(plan, tree.memories.fullest(plan, tree.batch)) for plan in plans]
