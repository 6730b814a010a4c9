"""A Plan with a fixed micro-batch, chosen once a batch is known."""

from __future__ import annotations

import dataclasses

from shoal.errors import PlanError
from shoal.plan.degrees import divisors
from shoal.plan.plan import Plan
from shoal.plan.schedules import kind_of
from shoal.plan.shares import Shares


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
