"""The Plans of a Space as a tree; a search makes only the branches that it looks at.

    portion     degrees, a micro-batch and a recompute policy, with a lower bound on compute
    laid        a portion and a layout of blocks, with their costs, including communication within them
    variant     a Plan without its sharding
    cut         a variant, with the layers of its stages
    sharded     a Plan, with the cost of its pipeline
    timed       a Plan, with its predicted step

Every branch gives a lower bound on a step's seconds, over all Plans that grow from it and may fit: each
sharding determines a rank's states and communication. The seconds of a timed Plan are those of its step.
Branches are kept: searches of one tree share what they have computed. Tests check the bounds against every
Plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

from shoal.cost import Layout, RankMemory, StepCost
from shoal.cost.time import PipelineCost, exposed_sends
from shoal.plan import SettledPlan
from shoal.plan.schedules import kind_of
from shoal.planner.bound import least_seconds
from shoal.planner.bucket import best_bucket
from shoal.planner.memory_bound import Share, StateBytes
from shoal.planner.shared import Shared
from shoal.planner.space import RECOMPUTES, Degrees, HybridSharding, Variant

__all__ = ["Branch", "Timed", "Tree"]


class Branch(Protocol):
    """A set of Plans; its branches are subsets."""

    @property
    def degrees(self) -> Degrees:
        """Degrees of all these Plans."""

    @property
    def branches(self) -> Sequence[Branch]:
        """Return subsets of these Plans; empty for a timed Plan."""

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
        if not shardings:
            return math.inf
        work = self._shared.compute(self._leanest)
        return max(self._least, self._count * self._shared.exchanging(self.degrees, shardings, work))

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
    def _least(self) -> float:
        """Return the seconds of compute, with the schedule that leaves the smallest bubble."""
        pp, count = self.degrees.pp, self._count
        work = self._shared.compute(self._leanest).total
        schedules = self._shared.space.schedules(pp, count)
        return min(least_seconds(pp, count, schedule, virtual, work) for schedule, virtual in schedules)


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
        return max(exchanging, self._least)

    @cached_property
    def branches(self) -> Sequence[Branch]:
        return [
            _Unsharded(
                self._shared,
                Variant(self.degrees, self._layout, self._count, schedule, virtual),
                self._shares,
                seconds,
                sends,
            )
            for seconds, sends, schedule, virtual in self._schedules
        ]

    @cached_property
    def _least(self) -> float:
        """Return the seconds of forwards and backwards."""
        return min([seconds for seconds, *_ in self._schedules])

    @cached_property
    def _schedules(self) -> Sequence[tuple[float, float, str, int]]:
        """Return schedules, each with a lower bound on a step's seconds, and its sends' part of them."""
        shared, count, degrees = self._shared, self._count, self.degrees
        pp, work = degrees.pp, shared.work(self._layout).total
        each = 0.0
        if pp > 1:
            each = shared.costs.send_apart(self._layout, degrees.dp * degrees.cp * degrees.tp)
        found = []
        for schedule, virtual in shared.space.schedules(pp, count):
            sends = each * exposed_sends(pp, count, virtual)
            passes = least_seconds(pp, count, schedule, virtual, work)
            found.append((passes + sends, sends, schedule, virtual))
        return found


class _Unsharded:
    """A variant."""

    def __init__(
        self, shared: Shared, variant: Variant, shares: Sequence[Share], least: float, sends: float
    ) -> None:
        self.degrees = variant.degrees
        self._shared = shared
        self._variant = variant
        self._shares = shares
        self._least = least
        self._sends = sends

    def seconds(self, room: float) -> float:
        return _of_variant(self._shared, self._variant, self._shares, self._least, room)

    @cached_property
    def branches(self) -> Sequence[Branch]:
        return [_Cut(self._shared, self._variant, self._shares, self._sends)]


class _Cut:
    """A variant whose stages are known, and so their times and memory."""

    def __init__(self, shared: Shared, variant: Variant, shares: Sequence[Share], sends: float) -> None:
        self.degrees = variant.degrees
        self._shared = shared
        self._variant = variant
        self._split = shared.split(variant)
        self._shares = (*shares, shared.least_memory.share(variant, self._split))
        self._sends = sends

    def seconds(self, room: float) -> float:
        return _of_variant(self._shared, self._variant, self._shares, self._least, room)

    @cached_property
    def branches(self) -> Sequence[Branch]:
        shared, variant, split = self._shared, self._variant, self._split
        shardings = shared.states(self.degrees)
        plan = shared.plan(variant, shardings[0][0], split)
        pipeline = shared.costs.pipeline(plan, variant.microbatches)
        return [
            _Sharded(shared, variant, sharding, split, self._memory(states), pipeline)
            for sharding, states in shardings
        ]

    @cached_property
    def _least(self) -> float:
        """Return the seconds of forwards and backwards."""
        shared, (degrees, layout, count, schedule, virtual) = self._shared, self._variant
        slowest, work = shared.slowest(self._variant, self._split), shared.work(layout).total
        return least_seconds(degrees.pp, count, schedule, virtual, work, slowest) + self._sends

    def _memory(self, states: StateBytes) -> float:
        """Return a lower bound on the bytes of a rank."""
        return max([self._shared.least_memory.peak(share, states) for share in self._shares])


class _Sharded:
    """A Plan that is not timed."""

    def __init__(
        self,
        shared: Shared,
        variant: Variant,
        sharding: HybridSharding,
        split: Sequence[int],
        memory: float,
        pipeline: PipelineCost,
    ) -> None:
        self.degrees = variant.degrees
        self.memory = memory
        self._shared = shared
        self._variant = variant
        self._sharding = sharding
        self._split = split
        self._pipeline = pipeline

    def seconds(self, room: float) -> float:
        return self._least if self.memory <= room else math.inf

    @cached_property
    def branches(self) -> Sequence[Branch]:
        plan = self._shared.plan(self._variant, self._sharding, self._split)
        return [Timed(self._shared, self.degrees, self.memory, plan)]

    @cached_property
    def _least(self) -> float:
        """Return the seconds with a lower bound on communication."""
        degrees, layout, count, schedule, virtual = self._variant
        exchange = self._shared.least_data_parallel
        placement = kind_of(schedule).placement(degrees.pp, virtual)
        layers = [number for rank, number in zip(placement, self._split, strict=True) if rank == 0]
        stages = list(zip(self._pipeline.unlike[0].stage.stages, layers, strict=True))
        once = exchange.of_step(degrees, self._sharding, stages, count)
        layer = self._shared.work(layout).least
        each = exchange.of_micro_batch(degrees, self._sharding, layer)
        return max(self._pipeline.total + once, count * each)


class Timed:
    """A Plan whose step was predicted.

    Attributes:
        degrees: The Plan's degrees.
        memory: Lower bound on the bytes of a rank.
        plan: The Plan.
        cost: Cost of the Plan's step.
    """

    branches: Sequence[Branch] = ()

    def __init__(self, shared: Shared, degrees: Degrees, memory: float, plan: SettledPlan) -> None:
        self.degrees = degrees
        self.memory = memory
        self.plan = plan
        self.cost: StepCost = shared.costs.step(plan, shared.space.batch)
        self._shared = shared

    def seconds(self, room: float) -> float:
        """Return the seconds of a step; infinite if a rank does not fit."""
        return self.cost.seconds if self.memory <= room else math.inf

    def fitted(self, room: float) -> tuple[SettledPlan, RankMemory] | None:
        """Return the Plan with the best bucket size, else the usual one, and its memory; None if too large.

        Memory depends on this size only with zero2; otherwise a Plan that does not fit gets no other size.
        """
        if not self.plan.sharding.bucket_is_memory and self._memory.peak > room:
            return None
        for plan, memory in self._bucketed:
            if memory.peak <= room:
                return plan, memory
        return None

    @cached_property
    def _memory(self) -> RankMemory:
        """Return the memory with the usual bucket size."""
        return self._shared.memories.fullest(self.plan, self._shared.space.batch)

    @cached_property
    def _bucketed(self) -> Sequence[tuple[SettledPlan, RankMemory]]:
        shared, batch = self._shared, self._shared.space.batch
        sizes = dict.fromkeys((best_bucket(shared.costs, self.plan, batch), self.plan.bucket))
        plans = [self.plan.replace(bucket=size) for size in sizes]
        return [(plan, shared.memories.fullest(plan, batch)) for plan in plans]


def _of_variant(
    shared: Shared, variant: Variant, shares: Sequence[Share], least: float, room: float
) -> float:
    """Return a lower bound on a step's seconds of a variant whose forwards and backwards take `least`."""
    shardings = shared.fitting(variant.degrees, shares, room)
    if not shardings:
        return math.inf
    work = shared.work(variant.layout)
    return max(least, variant.microbatches * shared.exchanging(variant.degrees, shardings, work))
