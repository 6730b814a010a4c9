"""The last branches of `shoal.planner.tree`: a Plan with sizes of buckets, and one that is played."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from shoal.cost import RankMemory
from shoal.plan import SettledPlan
from shoal.planner.bucket import SIZES
from shoal.planner.shared import Shared
from shoal.planner.space import Degrees


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
