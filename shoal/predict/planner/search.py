"""The search: the best Plans of a space, without a look at most of them.

It goes best first through the tree of `shoal.predict.planner.tree`, with a heap. It takes out the branch with
the least bound, and puts in the branches that grow from it, except those that cannot fit. When a Plan is
taken out whose memory is known to fit, its step is played. A second process may have a heap with half of the
degrees (`shoal.predict.planner.helper_process`); what comes out of both is taken in the order of the bounds.

Every Plan that is still in a heap takes at least the bound at its top. So when this bound reaches the
played seconds of the best Plan of some degrees, less a slack, no other Plan of these degrees is quicker by
more than that: they are done. The search ends with as many degrees done as were asked for. It looks at the
same Plans in the same order however many those are, so that the best Plan does not depend on their number. A
test compares with a search that plays all Plans.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from shoal.predict.cost.memory import too_large
from shoal.predict.planner.candidate import Candidate
from shoal.predict.planner.helper_process import Helper, can_help
from shoal.predict.planner.memory_bound import LeastMemory
from shoal.predict.planner.search_cache import Shared
from shoal.predict.planner.space import Degrees, leanest_sharding
from shoal.predict.planner.tree import Fitted, Frontier, Key, Takes, Tree
from shoal.spec.cluster import Cluster
from shoal.spec.plan import OFFLOADED, SettledPlan
from shoal.spec.workload import Workload

SLACK = 0.004
"""The share of its seconds by which a Plan that was not played may be quicker than the best."""

LOOSE = 0.03
"""The same for Plans that only stand beside the best: those of other degrees, or of another machine."""


T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Ranking:
    """The result of a search.

    Attributes:
        candidates: The best Plan for each set of degrees, best first; empty if nothing fits.
        found: The same, as a search keeps them.
        legal: Number of legal Plans.
        played: Number of legal Plans that were played; bounds excluded the others.
    """

    candidates: tuple[Candidate, ...]
    found: tuple[Fitted, ...]
    legal: int
    played: int

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
        precision: The precision of all Plans; None for the type of 16 bits or more in which the device
            computes fastest.
        offload: What all Plans keep outside of the devices.
        resident: The search of the same training for Plans without `offload`; None if this is it.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        batch: int,
        *,
        margin: float = 0.1,
        least_memory: LeastMemory | None = None,
        precision: str | None = None,
        offload: str = OFFLOADED,
        resident: Search | None = None,
    ) -> None:
        self.workload = workload
        self.cluster = cluster
        self.batch = batch
        self.margin = margin
        self.precision = precision
        self.offload = offload
        self.resident = self if resident is None else resident
        known = None if resident is None else resident.shared
        self.shared: Shared = Shared(workload, cluster, batch, least_memory, precision, offload, known)
        self.tree = Tree(self.shared)
        self._helper: Helper | None = None

    def fork(self) -> None:
        """Let a second process search half of the degrees, where it pays; results stay the same."""
        if can_help(len(self.tree.degrees)):
            self._helper = Helper(self)

    def on(self, cluster: Cluster) -> Search:
        """Return a search of this workload on other links or quicker devices, with equal memory."""
        return Search(
            self.workload,
            cluster,
            self.batch,
            margin=self.margin,
            least_memory=self.shared.least_memory,
            precision=self.precision,
            offload=self.offload,
        )

    def outside(self, offload: str) -> Search:
        """Return a search of the same training for Plans that keep this outside of the devices."""
        return Search(
            self.workload,
            self.cluster,
            self.batch,
            margin=self.margin,
            precision=self.precision,
            offload=offload,
            resident=self.resident,
        )

    @property
    def room(self) -> float:
        """Bytes of the Cluster's `device` that a Plan may fill; compared with `RankMemory.required`."""
        return self.cluster.device.memory * (1 - self.margin)

    def best(
        self,
        limit: int,
        accept: Callable[[Degrees], bool] = lambda degrees: True,
        room: float | None = None,
        slack: float = SLACK,
        below: float = math.inf,
    ) -> Ranking:
        """Return the best Plan for each of the `limit` best accepted sets of degrees.

        Args:
            limit: Number of Plans.
            accept: Returns whether degrees are allowed.
            room: Bytes that a Plan may fill instead of `self.room`.
            slack: The share by which a Plan that was not played may be quicker than the first that is
                returned; LOOSE for the others.
            below: Seconds from which on no Plan is looked for.
        """
        room = self.room if room is None else room
        accepted = list(filter(accept, self.tree.degrees))
        if self._helper is not None:
            try:
                halves = self._helper.halves(accepted, room, limit)
                found = self._best_of(limit, accepted, halves, slack, below)
                self._helper.stop()
                return found
            except BrokenPipeError:
                self._helper = None
        frontier = Frontier(self.tree, enumerate(accepted), room, limit)
        return self._best_of(limit, accepted, [frontier], slack, below)

    def _best_of(
        self,
        limit: int,
        accepted: Sequence[Degrees],
        frontiers: Sequence[Takes],
        slack: float,
        below: float,
    ) -> Ranking:
        """Return the best Plans; the frontiers are those of the accepted degrees, by their numbers."""
        order = itertools.count()  # equal times of played Plans keep their order
        best: dict[Degrees, Fitted] = {}
        waiting: list[tuple[float, int, Degrees]] = []  # played Plans whose degrees are not done
        done: dict[Degrees, Fitted] = {}
        looked = 0
        while len(done) < limit:
            frontier = min(frontiers, key=_top)
            least, place = frontier.top
            if waiting and (1 - (LOOSE if done else slack)) * waiting[0][0] <= least:
                seconds, _, degrees = heapq.heappop(waiting)
                if degrees not in done and best[degrees].seconds == seconds:
                    done[degrees] = best[degrees]
                continue
            if not place or least >= below:  # nothing is left
                break
            degrees = accepted[place[0]]
            if degrees in done:
                frontier.drop()
                continue
            look = frontier.take()
            if look is None:
                continue
            looked += 1
            fitted, before = look.fitted, best.get(degrees)
            if fitted is None:
                continue
            self.shared.learn({fitted.plan: fitted.seconds})
            if before is None or fitted.seconds < before.seconds:
                best[degrees] = fitted
                heapq.heappush(waiting, (fitted.seconds, next(order), degrees))
        legal = sum(map(self.tree.count, accepted))
        return Ranking(tuple(map(self.candidate, done.values())), tuple(done.values()), legal, looked)

    def each(
        self, task: Callable[[Search, T], R], arguments: Sequence[T], helped: Sequence[bool]
    ) -> Sequence[R]:
        """Return task(search, argument) for each argument.

        Args:
            task: A function of a module. It may play Plans, and does not ask which ones are known.
            arguments: The arguments.
            helped: Whether the helper, if there is one, does each.
        """
        if self._helper is not None and any(helped):
            try:
                return self._each_with(self._helper, task, arguments, helped)
            except BrokenPipeError:
                self._helper = None
        return [task(self, argument) for argument in arguments]

    def _each_with(
        self, helper: Helper, task: Callable[[Search, T], R], arguments: Sequence[T], helped: Sequence[bool]
    ) -> list[R]:
        sorted_out = list(zip(arguments, helped, strict=True))
        helper.ask(task, [argument for argument, is_helped in sorted_out if is_helped])
        mine = iter(
            [
                self.shared.noting(partial(task, self, argument))
                for argument, is_helped in sorted_out
                if not is_helped
            ]
        )
        theirs, found = helper.answers(), []
        for is_helped in helped:
            result, played = next(theirs if is_helped else mine)
            self.shared.learn(played)
            found.append(result)
        return found

    def helps(self, degrees: Degrees) -> bool:
        """Return whether the helper has these degrees in its half; False if there is none."""
        return self._helper is not None and self._helper.helps(degrees)

    def candidate(self, fitted: Fitted) -> Candidate:
        """Return the candidate of a Plan that fits."""
        return Candidate(fitted.plan, self.workload, self.cluster, self.batch, *fitted[1:], self.shared.costs)

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


def _top(frontier: Takes) -> Key:
    return frontier.top
