"""The Plans of a Space as a tree; a search makes only the branches that it looks at.

    portion     degrees, a micro-batch and a recompute policy, with a lower bound on compute
    laid        a portion and a layout of blocks, with their costs, including communication within them
    cut         a layout and a schedule, with the layers of its stages
    sharded     a sharding, whose communication is bounded without a Plan
    timed       a Plan for any size of buckets
    sized       a Plan, with sizes of buckets
    piped       a Plan that fits, with the best size and its forwards and backwards played

Every branch gives a lower bound on a step's seconds, over all Plans that grow from it and may fit: each
sharding determines a rank's states and communication. A piped Plan is played in full. Branches are kept:
searches of one tree share what they have computed. Tests check the bounds against every Plan, played.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import NamedTuple, Protocol

from shoal.cost import Layout, RankMemory
from shoal.plan import SettledPlan
from shoal.planner.bucket import SIZES
from shoal.planner.memory_bound import Share, StateBytes
from shoal.planner.shared import Shared
from shoal.planner.space import RECOMPUTES, Degrees, HybridSharding, Variant

__all__ = ["Branch", "Fitted", "Piped", "Tree"]


class Branch(Protocol):
    """A set of Plans; its branches are subsets."""

    @property
    def degrees(self) -> Degrees:
        """Degrees of all these Plans."""

    @property
    def branches(self) -> Sequence[Branch]:
        """Return subsets of these Plans; empty for a piped Plan."""

    def seconds(self, room: float) -> float:
        """Return a lower bound on a step's seconds with `room` bytes per rank; infinite if nothing fits."""


class Tree:
    """All legal Plans of a Space.

    Args:
        shared: Values that the Plans share.
    """

    def __init__(self, shared: Shared) -> None:
        self.degrees = list(shared.space.degrees())
        self._shared = shared
        self._portions: dict[Degrees, Sequence[Branch]] = {}
        self._counts: dict[Degrees, int] = {}

    def portions(self, degrees: Degrees) -> Sequence[Branch]:
        """Return the branches from which all Plans of these degrees grow."""
        found = self._portions.get(degrees)
        if found is None:
            found = self._portions[degrees] = [
                _Portion(self._shared, degrees, microbatch, count, recompute)
                for microbatch, count in self._shared.space.microbatches(degrees)
                for recompute in RECOMPUTES
            ]
        return found

    def count(self, degrees: Degrees) -> int:
        """Return the number of Plans of these degrees."""
        found = self._counts.get(degrees)
        if found is None:
            found = self._counts[degrees] = self._shared.space.count(degrees)
        return found


class _Portion:
    """Degrees, a micro-batch, and a recompute policy."""

    def __init__(self, shared: Shared, degrees: Degrees, microbatch: int, count: int, recompute: str) -> None:
        self.degrees = degrees
        self._shared = shared
        self._count = count
        self._leanest = shared.space.layout(degrees, microbatch, recompute)

    def seconds(self, room: float) -> float:
        shardings = self._shared.fitting(self.degrees, self._shares, room)
        if not shardings or not self._has_schedule:
            return math.inf
        work = self._shared.compute(self._leanest)
        ranks = self._shared.ranks(self.degrees, self._leanest, only_compute=True)
        least = self._count * work.total / ranks  # of the rank with most work
        return max(least, self._count * self._shared.exchanging(self.degrees, shardings, work))

    @cached_property
    def branches(self) -> Sequence[Branch]:
        leanest = self._leanest
        layouts = self._shared.space.layouts(self.degrees, leanest.microbatch, leanest.recompute)
        return [_Laid(self._shared, self.degrees, layout, self._count) for layout in layouts]

    @cached_property
    def _shares(self) -> Sequence[Share]:
        """Return shares of the rank that has most layers."""
        return (self._shared.least_memory.share_of_degrees(self.degrees, self._leanest),)

    @cached_property
    def _has_schedule(self) -> bool:
        return any(True for _ in self._shared.space.schedules(self.degrees.pp, self._count))


class _Laid:
    """Degrees, and a layout of blocks."""

    def __init__(self, shared: Shared, degrees: Degrees, layout: Layout, count: int) -> None:
        self.degrees = degrees
        self._shared = shared
        self._layout = layout
        self._count = count
        self._shares = (shared.least_memory.share_of_degrees(degrees, layout),)

    def seconds(self, room: float) -> float:
        shardings = self._shared.fitting(self.degrees, self._shares, room)
        if not shardings:
            return math.inf
        work = self._shared.work(self._layout)
        exchanging = self._count * self._shared.exchanging(self.degrees, shardings, work)
        ranks = self._shared.ranks(self.degrees, self._layout, only_compute=False)
        return max(exchanging, self._count * work.total / ranks)

    @cached_property
    def branches(self) -> Sequence[Branch]:
        schedules = self._shared.space.schedules(self.degrees.pp, self._count)
        return [
            _Cut(
                self._shared,
                Variant(self.degrees, self._layout, self._count, schedule, virtual),
                self._shares,
            )
            for schedule, virtual in schedules
        ]


class _Cut:
    """A layout and a schedule, whose stages are known, and so their times and memory."""

    def __init__(self, shared: Shared, variant: Variant, shares: Sequence[Share]) -> None:
        self.degrees = variant.degrees
        self._shared = shared
        self._variant = variant
        self._split = shared.split(variant)
        self._least_shares = (*shares, shared.least_memory.share(variant, self._split))

    def seconds(self, room: float) -> float:
        shardings = self._shared.fitting(self.degrees, self._least_shares, room)
        if shardings and room < math.inf:
            shardings = self._shared.fitting(self.degrees, self._shares, room)
        if not shardings:
            return math.inf
        variant = self._variant
        work = self._shared.work(variant.layout)
        exchanging = variant.microbatches * self._shared.exchanging(self.degrees, shardings, work)
        return max(self._least, exchanging)

    @cached_property
    def branches(self) -> Sequence[Branch]:
        shared, variant, split = self._shared, self._variant, self._split
        return [
            _Sharded(shared, variant, sharding, split, partial(self._memory, states), self._least)
            for sharding, states in shared.states(self.degrees)
        ]

    @cached_property
    def _least(self) -> float:
        """Return the seconds of forwards and backwards."""
        return self._shared.costs.least_of_passes(self._unsharded, self._variant.microbatches)

    @cached_property
    def _shares(self) -> Sequence[Share]:
        """Return the shares of the ranks that may be fullest."""
        return self._shared.shares(self._unsharded)

    @cached_property
    def _unsharded(self) -> SettledPlan:
        shared = self._shared
        return shared.plan(self._variant, shared.states(self.degrees)[0][0], self._split)

    def _memory(self, states: StateBytes) -> float:
        """Return a lower bound on the bytes of a rank."""
        return max([self._shared.least_memory.peak(share, states) for share in self._shares])


class _Sharded:
    """A sharding of a cut model."""

    def __init__(
        self,
        shared: Shared,
        variant: Variant,
        sharding: HybridSharding,
        split: Sequence[int],
        memory: Callable[[], float],
        passes: float,
    ) -> None:
        self.degrees = variant.degrees
        self._shared = shared
        self._variant = variant
        self._sharding = sharding
        self._split = split
        self._least_memory = memory
        self._passes = passes

    def seconds(self, room: float) -> float:
        return math.inf if room < math.inf and self._memory > room else self._least

    @cached_property
    def branches(self) -> Sequence[Branch]:
        return [_Timed(self._shared, self._variant, self._sharding, self._split)]

    @cached_property
    def _memory(self) -> float:
        """Return a lower bound on the bytes of a rank."""
        return self._least_memory()

    @cached_property
    def _least(self) -> float:
        """Return the seconds with what is known of communication before the Plan is made."""
        least, count = self._shared.least_data_parallel, self._variant.microbatches
        each = least.of_micro_batch(
            self.degrees, self._sharding, self._shared.work(self._variant.layout).least
        )
        after = least.after_passes(self.degrees, self._sharding, min(self._split))
        return max(self._passes + after, count * each)


class _Timed:
    """A Plan for any size of buckets."""

    def __init__(
        self, shared: Shared, variant: Variant, sharding: HybridSharding, split: Sequence[int]
    ) -> None:
        self.degrees = variant.degrees
        self._shared = shared
        self._variant = variant
        self._sharding = sharding
        self._split = split

    def seconds(self, room: float) -> float:
        return math.inf if room < math.inf and self._cut_weights() > room else self._least

    def _cut_weights(self) -> float:
        """Return the bytes of the fullest rank if weights are cut, where the bound is less; otherwise 0."""
        cuts = self._sharding.kind.cuts_weights
        return self._shared.fullest(self._plan).required if cuts else 0.0

    @cached_property
    def branches(self) -> Sequence[Branch]:
        return [_Sized(self._shared, self._plan, None if self._has_sizes else self._least)]

    @cached_property
    def _has_sizes(self) -> bool:
        """Whether several sizes of buckets are tried."""
        degrees, kind = self.degrees, self._sharding.kind
        if degrees.dp * degrees.cp == 1 or kind.cuts_weights:
            return False
        # In a pipeline nothing hides small buckets' reductions, and only gathers begin earlier with them.
        return degrees.pp == 1 or kind.bucket_is_memory or kind.gathers_each_step

    @cached_property
    def _plan(self) -> SettledPlan:
        """Return the Plan with the largest buckets; if each block is a bucket, with those of its own."""
        is_own = self.degrees.dp * self.degrees.cp == 1 or self._sharding.kind.cuts_weights
        size = None if is_own else SIZES[-1]
        return self._shared.plan(self._variant, self._sharding, self._split, size)

    @cached_property
    def _least(self) -> float:
        """Return a lower bound for all sizes of buckets."""
        costs, batch = self._shared.costs, self._shared.space.batch
        return costs.least_of_sizes(self._plan, batch) if self._has_sizes else costs.least(self._plan, batch)


class Fitted(NamedTuple):
    """A Plan that fits.

    Attributes:
        plan: The Plan.
        memory: Memory of its fullest rank.
        seconds: Seconds of its step, played.
    """

    plan: SettledPlan
    memory: RankMemory
    seconds: float


class _Sized:
    """A Plan, and the sizes of buckets that are tried with it; `least` is its bound if only its own is."""

    def __init__(self, shared: Shared, plan: SettledPlan, least: float | None) -> None:
        self.degrees = Degrees.of(plan)
        self._plan = plan
        self._least = least
        self._shared = shared

    def seconds(self, room: float) -> float:
        return self._sizes[0][0]

    @cached_property
    def branches(self) -> Sequence[Branch]:
        return [Piped(self._shared, self.degrees, self._sizes)]

    @cached_property
    def _sizes(self) -> Sequence[tuple[float, SettledPlan]]:
        """Return the Plan with each size, and its lower bound, least first."""
        if self._least is not None:
            return [(self._least, self._plan)]
        costs, batch = self._shared.costs, self._shared.space.batch
        plans = [self._plan.replace(bucket=size) for size in SIZES]
        return sorted([(costs.least(each, batch), each) for each in plans], key=lambda each: each[0])


class Piped:
    """A Plan whose memory is known, with its forwards and backwards played.

    Args:
        shared: Values that Plans share.
        degrees: The Plan's degrees.
        sizes: The Plan with each size of buckets, and a lower bound on its seconds, least first.
    """

    branches: Sequence[Branch] = ()

    def __init__(self, shared: Shared, degrees: Degrees, sizes: Sequence[tuple[float, SettledPlan]]) -> None:
        self.degrees = degrees
        self._shared = shared
        self._sizes = sizes

    def seconds(self, room: float) -> float:
        """Return a lower bound on the seconds of a step; infinite if a rank does not fit."""
        plan = self._fitting(room)
        if plan is None:
            return math.inf
        passes = self._shared.played_passes(plan)
        return self._shared.costs.least(plan, self._shared.space.batch, passes)

    def fitted(self, room: float) -> Fitted | None:
        """Play the Plan; return None if it does not fit."""
        plan = self._fitting(room)
        if plan is None:
            return None
        return Fitted(plan, self._shared.fullest(plan), self._shared.played(plan))

    def _fitting(self, room: float) -> SettledPlan | None:
        """Return the Plan with the size of the least bound that fits.

        Memory depends on this size only with zero2; otherwise a Plan that does not fit gets no other size.
        """
        for _, plan in self._sizes:
            if self._shared.fullest(plan).required <= room:
                return plan
            if not plan.sharding.bucket_is_memory:
                break
        return None
