"""A Plan with a fixed micro-batch, chosen once a batch is known.

Caches of functions of a Plan, with keys that cannot lack a field: they are the fields that were read.

A function that is cached gets a Plan that notes which of its fields are read. Their values, with the other
arguments, are the key. If a call reads a field that none read before, the keys get it too, and the cache
begins anew. The function has to depend on its arguments alone, and on what never changes.

What each block of a pipeline stage does with the activations that its backward needs.

A block keeps them in memory, makes them again in backward (`recompute`), or has them in a file from forward
to backward (`offload=activations:file`). Both settings may name a number of the model's blocks: a stage has
its share, rounded up.

    stored      spread evenly over the stage, so that the file is written and read while other blocks compute
    recomputed  the first ones of the others, then the first ones of the stored: in backward they come last,
                when what other blocks kept is free again, so that what is made again adds nothing to the peak

A block that is both has in the file what recompute leaves of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar, TypeVarTuple

from shoal.errors import PlanError
from shoal.spec.plan.allowed_values import Recompute
from shoal.spec.plan.offload import Tiers
from shoal.spec.plan.plan import Plan
from shoal.spec.plan.schedules import kind_of
from shoal.spec.plan.sharding import divisors
from shoal.spec.plan.uneven_micro_batches import Shares


class SettledPlan(Plan):
    """A Plan whose micro-batch is a number, as costs, memory and steps require.

    It equals a Plan with equal settings. Only `of` checks it against a batch.
    """

    __slots__ = ()

    microbatch: int

    def __post_init__(self) -> None:
        if self.microbatch is None:
            raise PlanError(
                f"the Plan {self} has no microbatch",
                possible="a Plan with microbatch, or SettledPlan.of(plan, batch), which chooses one",
                change="add, for example, microbatch=1",
            )
        super().__post_init__()

    @classmethod
    def of(cls, plan: Plan, batch: int) -> SettledPlan:
        """Return the Plan with its micro-batch settled for a batch of `batch` sequences.

        Raises:
            PlanError: The batch does not divide into the Plan's micro-batches.
        """
        fields = {field.name: getattr(plan, field.name) for field in dataclasses.fields(Plan)}
        if (shares := plan.shared) is not None:
            shares.require_batch(batch, plan.microbatch)
            if plan.pp > 1:
                _require_schedule_takes_shares(plan, shares)
            return cls(**{**fields, "microbatch": batch // shares.total})
        if batch < 1 or batch % plan.dp:
            lower, upper = batch // plan.dp * plan.dp, (batch // plan.dp + 1) * plan.dp
            raise PlanError(
                f"a batch of {batch} does not divide over dp={plan.dp} ranks",
                possible=f"the batch is a multiple of {plan.dp}, or shares cut it",
                change="choose a batch of "
                + (f"{lower} or {upper}" if lower > 0 else f"{upper}")
                + _shares_that_cut(plan, batch),
            )
        local = batch // plan.dp
        microbatch = _largest_microbatch(plan, local) if plan.microbatch is None else plan.microbatch
        if local % microbatch:
            raise PlanError(
                f"a batch of {batch} gives each of dp={plan.dp} ranks {local} sequences, "
                f"which microbatch={microbatch} does not divide",
                possible=f"microbatch is one of {', '.join(map(str, divisors(local)))}",
                change="choose one of these, or another batch",
            )
        if plan.pp > 1:
            _require_schedule_takes(plan, batch, microbatch)
        return cls(**{**fields, "microbatch": microbatch})

    def microbatches_of(self, batch: int) -> int:
        """Return the number of micro-batches that each replica makes of a batch; with shares, the most."""
        if (shares := self.shared) is not None:
            return shares.most
        return batch // self.dp // self.microbatch


def _require_schedule_takes(plan: Plan, batch: int, microbatch: int) -> None:
    """Refuse a number of micro-batches with an error that names its causes: batch and `microbatch`."""
    local = batch // plan.dp
    try:
        plan.require_micro_batches(local // microbatch)
    except PlanError as error:
        fitting = [size for size in divisors(local) if _takes(plan, local // size)]
        fits = f"; with this batch, microbatch is {', '.join(map(str, fitting))}" if fitting else ""
        raise PlanError(
            f"{error.given}: a batch of {batch} gives this number with dp={plan.dp}, microbatch={microbatch}",
            possible=f"{error.possible}{fits}",
            change=f"write microbatch={fitting[-1]}"
            if fitting
            else "choose another batch or another schedule",
        ) from None


def _require_schedule_takes_shares(plan: Plan, shares: Shares) -> None:
    try:
        plan.require_micro_batches(shares.most)
    except PlanError as error:
        raise PlanError(
            f"{error.given}: shares={shares} gives each rank this number, with those that it makes again",
            possible=error.possible,
            change="choose other shares or another schedule",
        ) from None


def _shares_that_cut(plan: Plan, batch: int) -> str:
    """Return the advice to write shares for a batch that does not divide; empty if the Plan takes none."""
    if batch < plan.dp:
        return ""
    shares = str(Shares.even(batch, plan.dp))
    try:
        SettledPlan.of(plan.replace(shares=shares, microbatch=1), batch)
    except PlanError:
        return ""
    return f", or write microbatch=1,shares={shares}"


def _largest_microbatch(plan: Plan, local: int) -> int:
    """Return the largest that makes four micro-batches a stage, or else the smallest, of those that fit."""
    if plan.pp == 1:
        return local
    fitting = [size for size in divisors(local) if _takes(plan, local // size)]
    enough = [size for size in fitting if local // size >= 4 * plan.pp]
    return max(enough) if enough else min(fitting, default=1)


def _takes(plan: Plan, micro_batches: int) -> bool:
    return kind_of(plan.schedule).takes(plan.pp, plan.stages // plan.pp, micro_batches)


R = TypeVar("R")
Others = TypeVarTuple("Others")


class ByFields(Generic[*Others, R]):
    """Caches a function of a Plan by the fields that it reads, and by its other arguments.

    A cached function may call another one with its Plan: what that one has read is then read by both.

    Args:
        function: The function; its other arguments are hashable.
    """

    def __init__(self, function: Callable[[SettledPlan, *Others], R]) -> None:
        self._function = function
        self._fields: tuple[str, ...] = ()
        self._values: Callable[[Plan], object] = bool  # of no field: equal for all Plans
        self._known: dict[object, R] = {}

    def __call__(self, plan: Plan, *others: *Others) -> R:
        """Return what the function returns for these arguments."""
        found = self._known.get((self._values(plan), others))
        if found is None:
            noting = _Noting.having(self._fields, plan)
            found = self._function(noting, *others)
            if noting.read:
                self._fields += tuple(noting.read)
                self._values = attrgetter(*self._fields)
                self._known.clear()
            self._known[self._values(plan), others] = found
        return found


class _Noting(SettledPlan):
    """A Plan that has some fields of another one; `read` are those that it got because they were read."""

    __slots__ = ("_whole", "read")
    _whole: Plan
    read: list[str]

    @classmethod
    def having(cls, fields: tuple[str, ...], whole: Plan) -> _Noting:
        """Return a Plan that has these fields of a whole one."""
        made, give = cls.__new__(cls), object.__setattr__
        give(made, "_whole", whole)
        give(made, "read", [])
        for name in fields:
            give(made, name, getattr(whole, name))
        return made

    def __getattr__(self, name: str) -> Any:
        """Return a field that it does not have yet: called where the slot is empty."""
        value = getattr(self._whole, name)
        object.__setattr__(self, name, value)
        self.read.append(name)
        return value


class BlockChoices(NamedTuple):
    """Blocks of a stage that do not keep their activations in memory, by their places in it.

    Attributes:
        recomputed: The blocks with the Plan's recompute policy.
        stored: The blocks with activations in a file.
    """

    recomputed: frozenset[int]
    stored: frozenset[int]


def block_choices(plan: Plan, blocks: int, every: int) -> BlockChoices:
    """Return which blocks of a stage recompute, and which have activations in a file.

    Args:
        plan: The Plan.
        blocks: Number of the stage's blocks.
        every: Number of the model's blocks.
    """
    return _chosen(plan.recomputed, plan.tiers, blocks, every)


@lru_cache(maxsize=1 << 12)
def _chosen(recompute: Recompute, tiers: Tiers, blocks: int, every: int) -> BlockChoices:
    number = tiers.stored_blocks(blocks, every)
    stored = [place * blocks // number for place in range(number)]
    others = [place for place in range(blocks) if place not in stored]
    again = (*others, *stored)[: recompute.count(blocks, every)]
    return BlockChoices(frozenset(again), frozenset(stored))
