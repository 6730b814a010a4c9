"""The search: the exact best Plans of a space, without a look at most of them.

It goes best first through the tree of `shoal.planner.tree`, with one heap. It takes out the branch with the
least bound, and puts in the branches that grow from it, except those that cannot fit. When a timed Plan is
taken out, no other is quicker, so its memory is computed in full. If it fits, it is the best Plan of its
degrees.

Degrees whose best Plan is known are not searched further, and the search ends with as many degrees as were
asked for. Plans that were skipped cannot be better: a test compares with a search that times all Plans.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shoal.cluster import Cluster
from shoal.cost import RankMemory, StepCost
from shoal.cost.memory import too_large
from shoal.cost.outlook import with_stragglers
from shoal.plan import SettledPlan
from shoal.planner.candidate import Candidate
from shoal.planner.memory_bound import LeastMemory
from shoal.planner.shared import Shared
from shoal.planner.space import Degrees, leanest_sharding
from shoal.planner.tree import Branch, Timed, Tree
from shoal.workload import Workload

__all__ = ["Ranking", "Search"]


@dataclass(frozen=True, slots=True)
class Ranking:
    """The result of a search.

    Attributes:
        candidates: The best Plan for each set of degrees, best first; empty if nothing fits.
        legal: Number of legal Plans.
        timed: Number of legal Plans whose step was predicted in full; bounds excluded the others.
    """

    candidates: tuple[Candidate, ...]
    legal: int
    timed: int

    @property
    def best(self) -> Candidate | None:
        """The best candidate."""
        return self.candidates[0] if self.candidates else None


class Search:
    """Searches of one Workload on one Cluster, which share what they compute.

    Args:
        workload: The training.
        cluster: The machines that it runs on; every device takes part.
        batch: Samples of a step.
        margin: Share of each device's memory that must stay free.
        least_memory: Bounds for this Workload on devices with equal memory, to share; None to compute them.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        batch: int,
        *,
        margin: float = 0.1,
        least_memory: LeastMemory | None = None,
    ) -> None:
        self.workload = workload
        self.cluster = cluster
        self.batch = batch
        self.margin = margin
        self.shared = Shared(workload, cluster, batch, least_memory)
        self.tree = Tree(self.shared)

    def on(self, cluster: Cluster) -> Search:
        """Return a search of this workload on other links or quicker devices, with equal memory."""
        return Search(
            self.workload, cluster, self.batch, margin=self.margin, least_memory=self.shared.least_memory
        )

    @property
    def room(self) -> float:
        """Bytes of a device's memory that a Plan may fill."""
        return self.cluster.device.memory * (1 - self.margin)

    def best(
        self,
        limit: int,
        accept: Callable[[Degrees], bool] = lambda degrees: True,
        room: float | None = None,
    ) -> Ranking:
        """Return the best Plan for each of the `limit` best accepted sets of degrees.

        Args:
            limit: Number of Plans.
            accept: Returns whether degrees are allowed.
            room: Bytes that a Plan may fill instead of `self.room`.
        """
        room = self.room if room is None else room
        accepted = list(filter(accept, self.tree.degrees))
        order = itertools.count()  # equal times keep their order
        heap: list[tuple[float, int, Branch]] = []

        def put(branches: Iterable[Branch]) -> None:
            for branch in branches:
                seconds = branch.seconds(room)
                if seconds < math.inf:
                    heapq.heappush(heap, (seconds, next(order), branch))

        put(itertools.chain.from_iterable(map(self.tree.portions, accepted)))
        found: dict[Degrees, Candidate] = {}
        timed = 0
        while heap and len(found) < limit:
            branch = heapq.heappop(heap)[2]
            if branch.degrees in found:
                continue
            if not isinstance(branch, Timed):
                timed += isinstance(branch.branches[0], Timed)
                put(branch.branches)
                continue
            if (fitted := branch.fitted(room)) is not None:
                found[branch.degrees] = self.candidate(*fitted)
        legal = sum(map(self.tree.count, accepted))
        return Ranking(tuple(found.values()), legal, timed)

    def cost(self, plan: SettledPlan) -> StepCost:
        """Return the cost of a step under a Plan, with the wait for the slowest rank."""
        return with_stragglers(self.shared.costs.step(plan, self.batch), self.cluster)

    def candidate(self, plan: SettledPlan, memory: RankMemory) -> Candidate:
        """Return the candidate of a Plan whose fullest rank has this memory."""
        return Candidate(plan, self.workload, self.cluster, self.batch, self.cost(plan), memory)

    def leanest(self) -> tuple[SettledPlan, str] | None:
        """Return a frugal Plan, and by how much it does not fit; None if no Plan is legal."""
        space, least = self.shared.space, self.shared.least_memory
        lean: list[tuple[float, SettledPlan]] = []
        for degrees in self.tree.degrees:
            sharding = leanest_sharding(degrees)
            variants = itertools.takewhile(lambda each: each.layout.microbatch == 1, space.variants(degrees))
            for variant in variants:
                if variant.layout.recompute == "full" and variant.schedule == "1f1b":
                    counts = self.shared.split(variant)
                    plan = self.shared.plan(variant, sharding, counts)
                    states = least.states(degrees, sharding, variant.layout.precision)
                    lean.append((least.peak(least.share(variant, counts), states), plan))
        if not lean:
            return None
        plan = min(lean, key=lambda each: each[0])[1]
        return plan, too_large(self.shared.memories.fullest(plan, self.batch), self.cluster, self.margin)
