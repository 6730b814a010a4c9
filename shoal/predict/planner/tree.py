"""The Plans of a Space as a tree; a search makes only the branches that it looks at.

    portion     degrees, a micro-batch and a recompute policy, with a lower bound on compute
    held        a portion, with the shardings that fit and their communication
    laid        a portion and a layout of blocks, with their costs, including communication within them
    cut         a layout and a schedule, with the layers of its stages
    sharded     a sharding, with what is known of its communication for all stages together
    staged      the same, with the communication of each stage, without a Plan
    timed       a Plan for any size of buckets
    sized       a Plan, with sizes of buckets
    piped       a Plan that fits, with the best size and its forwards and backwards played

Every branch gives a lower bound on a step's seconds, over all Plans that grow from it and may fit: each
sharding determines a rank's states and communication. A piped Plan is played in full. Branches are kept:
searches of one tree share what they have computed. Tests check the bounds against every Plan, played.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

from shoal.predict.cost import Layout, RankMemory
from shoal.predict.planner.memory_bound import Share, StateBytes
from shoal.predict.planner.search_cache import Shared
from shoal.predict.planner.space import RECOMPUTES, SIZES, Degrees, HybridSharding, Variant
from shoal.predict.planner.stage_bound import Stages, least_of_cut
from shoal.spec.plan import UNSHARDED, SettledPlan


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


class Sized:
    """A Plan, and the sizes of buckets that are tried with it; `least` is its bound if only its own is."""

    def __init__(self, shared: Shared, plan: SettledPlan, least: float | None) -> None:
        self.degrees = Degrees.of(plan)
        self._plan = plan
        self._least = least
        self._shared = shared

    def seconds(self, room: float) -> float:
        """Return a lower bound on the seconds of a step, over all sizes."""
        return self._sizes[0][0]

    @cached_property
    def branches(self) -> Sequence[Piped]:
        """Return the Plan to play."""
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

    branches: Sequence[Piped] = ()

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
        return Fitted(plan, self._shared.fullest(plan), self._shared.seconds(plan))

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
        return self._shared.late * self.passes if self._has_schedule else math.inf

    @cached_property
    def branches(self) -> Sequence[Branch]:
        return [_Held(self._shared, self, self._count, self._leanest)]

    @cached_property
    def passes(self) -> float:
        """Return the seconds of compute of the rank that has most of it, at least."""
        works = self._shared.works
        ranks = works.ranks(self.degrees, self._leanest, only_compute=True)
        return self._count * works.compute(self._leanest).total / ranks

    @cached_property
    def _has_schedule(self) -> bool:
        return any(True for _ in self._shared.space.schedules(self.degrees.pp, self._count))


class _Held:
    """A portion, with the shardings that fit."""

    def __init__(self, shared: Shared, portion: _Portion, count: int, leanest: Layout) -> None:
        self.degrees = portion.degrees
        self._shared = shared
        self._portion = portion
        self._count = count
        self._leanest = leanest

    def seconds(self, room: float) -> float:
        shardings = self._shared.shardings(self.degrees)
        fitting = shardings.fitting(self._shares, room)
        if not fitting:
            return math.inf
        work = self._shared.works.compute(self._leanest)
        return shardings.least(fitting, self._count, self._portion.passes, work, None)

    @cached_property
    def branches(self) -> Sequence[Branch]:
        leanest = self._leanest
        layouts = self._shared.space.layouts(self.degrees, leanest.microbatch, leanest.recompute)
        return [_Laid(self._shared, self.degrees, layout, self._count) for layout in layouts]

    @cached_property
    def _shares(self) -> Sequence[Share]:
        """Return shares of the rank that has most layers."""
        return (self._shared.least_memory.share_of_degrees(self.degrees, self._leanest),)


class _Laid:
    """Degrees, and a layout of blocks."""

    def __init__(self, shared: Shared, degrees: Degrees, layout: Layout, count: int) -> None:
        self.degrees = degrees
        self._shared = shared
        self._layout = layout
        self._count = count
        self._shares = (shared.least_memory.share_of_degrees(degrees, layout),)

    def seconds(self, room: float) -> float:
        shared = self._shared
        shardings = shared.shardings(self.degrees)
        fitting = shardings.fitting(self._shares, room)
        if not fitting:
            return math.inf
        work = shared.works.of(self._layout)
        ranks = shared.works.ranks(self.degrees, self._layout, only_compute=False)
        least = self._count * work.total / ranks
        return shardings.least(fitting, self._count, least, work, self._layout)

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
        shardings = self._shared.shardings(self.degrees)
        fitting = shardings.fitting(self._least_shares, room)
        if not fitting:
            return math.inf
        variant = self._variant
        work = self._shared.works.of(variant.layout)
        return shardings.least(fitting, variant.microbatches, self._least, work, variant.layout)

    @cached_property
    def branches(self) -> Sequence[Branch]:
        shardings = self._shared.shardings(self.degrees)
        return [
            _Sharded(self._shared, self._variant, number, self._split, self._timed)
            for number in range(len(shardings.every))
        ]

    @cached_property
    def _least(self) -> float:
        """Return a lower bound on the seconds of forwards and backwards."""
        variant, works = self._variant, self._shared.works
        work = works.of(variant.layout)
        if self.degrees.pp == 1:
            return (
                variant.microbatches
                * work.total
                / works.ranks(self.degrees, variant.layout, only_compute=False)
            )
        return least_of_cut(variant, self._split, work, works.sums(variant.layout))

    @cached_property
    def _timed(self) -> _TimedCut:
        return _TimedCut(self._shared, self._variant, self._split)


class _TimedCut:
    """The passes and the memory of a cut model, whatever its sharding."""

    def __init__(self, shared: Shared, variant: Variant, split: tuple[int, ...]) -> None:
        self._shared = shared
        self._variant = variant
        self._split = split

    @cached_property
    def passes(self) -> float:
        """Return the seconds of forwards and backwards, at least."""
        return self._shared.costs.least_of_passes(self._unsharded, self._variant.microbatches)

    @cached_property
    def stages(self) -> Stages:
        """Return the stages, with their least seconds."""
        return self._shared.stages(self._variant, self._split)

    def memory(self, states: StateBytes) -> float:
        """Return a lower bound on the bytes of a rank."""
        return max([self._shared.least_memory.peak(share, states) for share in self._shares])

    @cached_property
    def _shares(self) -> Sequence[Share]:
        """Return the shares of the ranks that may be fullest."""
        return self._shared.shares(self._unsharded)

    @cached_property
    def _unsharded(self) -> SettledPlan:
        return self._shared.plan(self._variant, HybridSharding(UNSHARDED, 1), self._split)


class _Sharded:
    """A sharding of a cut model, by its number."""

    def __init__(
        self, shared: Shared, variant: Variant, number: int, split: tuple[int, ...], cut: _TimedCut
    ) -> None:
        self.degrees = variant.degrees
        self._shared = shared
        self._variant = variant
        self._number = number
        self._split = split
        self._cut = cut

    def seconds(self, room: float) -> float:
        return math.inf if room < math.inf and self._memory > room else self._least

    @cached_property
    def branches(self) -> Sequence[Branch]:
        return [_Staged(self._shared, self._variant, self._number, self._split, self._cut)]

    @cached_property
    def _memory(self) -> float:
        """Return a lower bound on the bytes of a rank."""
        return self._cut.memory(self._shared.shardings(self.degrees).states[self._number])

    @cached_property
    def _least(self) -> float:
        """Return the seconds with what is known of communication before the Plan is made."""
        variant, shardings = self._variant, self._shared.shardings(self.degrees)
        passes = self._cut.passes + shardings.after_passes(self._number, self._split)
        work = self._shared.works.of(variant.layout)
        return shardings.least((self._number,), variant.microbatches, passes, work, variant.layout)


class _Staged:
    """A sharding of a cut model, with all its communication; the arguments are those of `_Sharded`."""

    def __init__(
        self, shared: Shared, variant: Variant, number: int, split: tuple[int, ...], cut: _TimedCut
    ) -> None:
        self.degrees = variant.degrees
        self._shared = shared
        self._variant = variant
        self._number = number
        self._split = split
        self._cut = cut

    def seconds(self, room: float) -> float:
        return self._least

    @cached_property
    def branches(self) -> Sequence[Branch]:
        sharding = self._shared.shardings(self.degrees).every[self._number]
        return [_Timed(self._shared, self._variant, sharding, self._split)]

    @cached_property
    def _least(self) -> float:
        """Return the seconds with what is known of communication before the Plan is made."""
        variant, shardings = self._variant, self._shared.shardings(self.degrees)
        passes = shardings.of_stages(self._number, self._cut.stages, variant.microbatches)
        work = self._shared.works.of(variant.layout)
        return shardings.least((self._number,), variant.microbatches, passes, work, variant.layout)


class _Timed:
    """A Plan for any size of buckets."""

    def __init__(
        self, shared: Shared, variant: Variant, sharding: HybridSharding, split: tuple[int, ...]
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
        return [Sized(self._shared, self._plan, None if self._has_sizes else self._least)]

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


Key = tuple[float, tuple[int, ...]]
"""What branches are sorted by: the bound, and the place in the tree, which begins with the number of the
degrees. Equal bounds come in the order of the tree, whatever the bounds of the branches that they grew from.
"""

NONE_LEFT: Key = (math.inf, ())
"""The key of an empty frontier."""


class Look(NamedTuple):
    """A Plan that was played; None if it does not fit."""

    fitted: Fitted | None


Taken = tuple[Key, Look | None]
"""A branch that was taken out, and the look at it if it was a Plan to play. Otherwise its branches are in."""


class Takes(Protocol):
    """Branches that are taken out one after another."""

    @property
    def top(self) -> Key:
        """The least key."""

    def take(self) -> Look | None:
        """Take out the branch with the least key: play it, or put in the branches that grow from it."""

    def drop(self) -> None:
        """Take out the branch with the least key, without a look."""


class Frontier:
    """The branches of some degrees, in a heap.

    Args:
        tree: The tree of Plans.
        degrees: Degrees, each with its number, by which equal bounds are sorted.
        room: Bytes that a Plan may fill.
        limit: Number of degrees whose best Plans are looked for.
    """

    def __init__(self, tree: Tree, degrees: Iterable[tuple[int, Degrees]], room: float, limit: int) -> None:
        self._room = room
        self._limit = limit
        self._best: dict[Degrees, float] = {}  # seconds of the Plans that were played
        self._ceiling = math.inf  # seconds above which no branch is needed
        self._heap: list[tuple[float, tuple[int, ...], Branch]] = []
        self._ahead = deque[Taken]()  # taken out before they were asked for
        for number, each in degrees:
            self._put(tree.portions(each), (number,))

    @property
    def top(self) -> Key:
        """The least key."""
        return self._ahead[0][0] if self._ahead else self.least

    @property
    def least(self) -> Key:
        """The least key of a branch that nothing took yet."""
        return self._heap[0][:2] if self._heap else NONE_LEFT

    @property
    def may_go_ahead(self) -> bool:
        """Whether to take out that branch before it is asked for.

        A search for the best Plan plays one or two, so it pays to wait until they are asked for.
        """
        if not self._heap or self._heap[0][0] >= self._ceiling:
            return False
        return self._limit > 1 or not isinstance(self._heap[0][2], Sized | Piped)

    def take(self) -> Look | None:
        """Take out the branch with the least key: play it, or put in the branches that grow from it."""
        return (self._ahead.popleft() if self._ahead else self.next())[1]

    def drop(self) -> None:
        """Take out the branch with the least key, without a look."""
        if self._ahead:
            self._ahead.popleft()
        else:
            heapq.heappop(self._heap)

    def go_ahead(self) -> None:
        """Take out the branch with the least key before it is asked for."""
        self._ahead.append(self.next())

    def next(self) -> Taken:
        """Take out the branch with the least key that nothing took yet, and return it."""
        seconds, place, branch = heapq.heappop(self._heap)
        if isinstance(branch, Piped):
            look = Look(branch.fitted(self._room))
            if look.fitted is not None:
                self._note(branch.degrees, look.fitted.seconds)
            return (seconds, place), look
        self._put(branch.branches, place)
        return (seconds, place), None

    def _note(self, degrees: Degrees, seconds: float) -> None:
        """Note a Plan that was played."""
        self._best[degrees] = min(seconds, self._best.get(degrees, math.inf))
        if len(self._best) >= self._limit:
            self._ceiling = sorted(self._best.values())[self._limit - 1]

    def _put(self, branches: Iterable[Branch], place: tuple[int, ...]) -> None:
        heap, room = self._heap, self._room
        for number, branch in enumerate(branches):
            seconds = branch.seconds(room)
            if seconds < math.inf:
                heapq.heappush(heap, (seconds, (*place, number), branch))
