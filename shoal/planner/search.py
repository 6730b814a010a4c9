"""The search: the best Plans of a space, exactly, with most of them never looked at.

Best first, over one heap that holds Plans at three states of knowledge, each by the least seconds that a step
can take for all that is known:

    variant     a Plan but for its sharding, by `least_seconds`, which needs no more than the costs of blocks.
                When it is taken out, each of its shardings that `LeastMemory` lets pass is timed, and put in.
    timed       a Plan, by its predicted step. When it is taken out, no other is quicker, so its memory is
                looked at in full: if it has room, it is the best of its degrees.

Degrees that have their best are not looked at again, and the search ends with as many degrees as were asked
for. What was not looked at cannot be better: a test compares with a search that looks at everything.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.cluster import Cluster
from shoal.cost.layout import Layout
from shoal.cost.memory import Memories
from shoal.cost.room import too_large
from shoal.cost.step import Costs, StepCost
from shoal.plan import Plan
from shoal.plan.schedules import placement_of
from shoal.planner.balance import balanced_split
from shoal.planner.bound import least_seconds
from shoal.planner.bucket import best_bucket
from shoal.planner.candidate import Candidate
from shoal.planner.room import LeastMemory
from shoal.planner.space import Degrees, Sharding, Space, Variant
from shoal.workload import Block, Workload

__all__ = ["Ranking", "Search"]


@dataclass(frozen=True, slots=True)
class Ranking:
    """What a search found.

    Attributes:
        candidates: The best Plan of each degrees, best first; none where nothing fits.
        legal: Number of legal Plans.
        timed: Of these, those whose step was predicted in full; bounds decided the others.
    """

    candidates: tuple[Candidate, ...]
    legal: int
    timed: int

    @property
    def best(self) -> Candidate | None:
        """The first."""
        return self.candidates[0] if self.candidates else None


class _Work(NamedTuple):
    """Seconds of a micro-batch, forward and backward."""

    total: float
    embedding: float
    layer: float
    end: float


class _Timed(NamedTuple):
    """A Plan whose step was predicted, and whose memory is yet to be."""

    degrees: Degrees
    plan: Plan
    cost: StepCost


class Search:
    """Searches of one Workload on one Cluster, which share what blocks cost.

    Args:
        workload: What is trained.
        cluster: Where; every device takes part.
        batch: Samples of a step.
        margin: Share of each device's memory that is to stay free; minus infinity for memory without limit.
    """

    def __init__(self, workload: Workload, cluster: Cluster, batch: int, *, margin: float = 0.1) -> None:
        self.workload = workload
        self.cluster = cluster
        self.batch = batch
        self.margin = margin
        self.costs = Costs(workload, cluster)
        self.memories = Memories(workload, cluster, self.costs)
        self._least_memory = LeastMemory(workload, cluster)
        kinds: dict[int, tuple[Block, int]] = {}
        for piece in workload.pieces:
            kinds[id(piece)] = piece, kinds.get(id(piece), (piece, 0))[1] + 1
        self._kinds = list(kinds.values())
        self._work: dict[Layout, _Work] = {}

    @property
    def room(self) -> float:
        """Bytes of a device's memory that a Plan may fill."""
        return self.cluster.device.memory * (1 - self.margin)

    def best(self, limit: int, accept: Callable[[Degrees], bool] = lambda degrees: True) -> Ranking:
        """The best Plan of each of the `limit` best degrees that are accepted."""
        space = Space(self.workload, self.cluster, self.batch, accept)
        order = itertools.count()  # of equals, the one that came first
        heap: list[tuple[float, int, Variant | _Timed]] = []
        shardings: dict[Degrees, list[Sharding]] = {}
        legal = timed = 0
        for degrees in space.degrees():
            shardings[degrees] = space.shardings(degrees)
            before = len(heap)
            for variant in space.variants(degrees):
                heap.append(
                    (least_seconds(variant, self._work_of(variant.layout).total), next(order), variant)
                )
            legal += (len(heap) - before) * len(shardings[degrees])
        heapq.heapify(heap)
        found: dict[Degrees, Candidate] = {}
        while heap and len(found) < limit:
            _, _, first = heapq.heappop(heap)
            if first.degrees in found:
                continue
            if isinstance(first, Variant):
                for plan in self._plans(first, shardings[first.degrees]):
                    cost = self.costs.step(plan, self.batch)
                    timed += 1
                    heapq.heappush(heap, (cost.seconds, next(order), _Timed(first.degrees, plan, cost)))
            elif (candidate := self._candidate(first)) is not None:
                found[first.degrees] = candidate
        return Ranking(tuple(found.values()), legal, timed)

    def leanest(self) -> tuple[Plan, str] | None:
        """A frugal Plan, and by how much it does not fit; None if no Plan is legal."""
        space = Space(self.workload, self.cluster, self.batch)
        lean: list[tuple[float, Plan]] = []
        for degrees in space.degrees():
            sharding = space.shardings(degrees)[-1]
            variants = itertools.takewhile(lambda each: each.layout.microbatch == 1, space.variants(degrees))
            for variant in variants:
                if variant.layout.recompute == "full" and variant.schedule == "1f1b":
                    counts = self.split(variant)
                    plan = self.plan(variant, sharding, counts)
                    lean.append((self._least_memory.of(variant, sharding, counts), plan))
        if not lean:
            return None
        plan = min(lean, key=lambda each: each[0])[1]
        return plan, too_large(self.memories.fullest(plan, self.batch), self.cluster, self.margin)

    def _plans(self, variant: Variant, shardings: Sequence[Sharding]) -> Iterator[Plan]:
        """The Plans of a variant that may have room."""
        counts = self.split(variant)
        for sharding in shardings:
            if self._least_memory.of(variant, sharding, counts) <= self.room:
                yield self.plan(variant, sharding, counts)

    def _candidate(self, timed: _Timed) -> Candidate | None:
        """A Plan with the best size of its buckets, if it has room with it or with the usual one."""
        for bucket in dict.fromkeys((best_bucket(self.costs, timed.plan, self.batch), timed.plan.bucket)):
            plan = timed.plan.replace(bucket=bucket)
            memory = self.memories.fullest(plan, self.batch)
            if memory.peak <= self.room:
                return Candidate(plan, self.workload, self.cluster, self.batch, timed.cost, memory)
        return None

    def _work_of(self, layout: Layout) -> _Work:
        """What blocks cost on the ranks of one replica."""
        work = self._work.get(layout)
        if work is None:
            costs = [(self.costs.block(block, layout), number) for block, number in self._kinds]
            seconds = [(cost.forward + cost.backward, number) for cost, number in costs]
            total = sum(each * number for each, number in seconds)
            first, last = seconds[0][0], seconds[-1][0]
            work = _Work(total, first, (total - first - last) / len(self.workload.layers), last)
            self._work[layout] = work
        return work

    def split(self, variant: Variant) -> tuple[int, ...]:
        """Layers of each stage, by what blocks cost."""
        layers = len(self.workload.layers)
        if variant.degrees.pp == 1:
            return (layers,)
        _, embedding, layer, end = self._work_of(variant.layout)
        placement = placement_of(variant.schedule, variant.degrees.pp, variant.virtual)
        return balanced_split(embedding, layer, end, layers, placement)

    def plan(self, variant: Variant, sharding: Sharding, split: Sequence[int]) -> Plan:
        """The Plan with these layers in its stages."""
        if len(split) == 1:
            return variant.plan(sharding)
        return variant.plan(sharding, "count" if len(set(split)) == 1 else "-".join(map(str, split)))
