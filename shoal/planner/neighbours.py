"""The neighbours of a Plan: legal Plans with one other setting, or a factor moved between two degrees."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from shoal.errors import PlanError
from shoal.plan import CHOICES, EQUAL, SettledPlan, divisors
from shoal.plan.order import DEFAULT_ORDER
from shoal.plan.schedules import KINDS, NAMES, kind_of
from shoal.planner.bucket import ALL_SIZES
from shoal.planner.space import RECOMPUTES, Space

_DEGREES = ("dp", "tp", "pp", "cp")
_KEEPING_SHARES = {"bucket", "recompute", "context", "tensor"}


def neighbours(space: Space, plan: SettledPlan) -> Iterator[SettledPlan]:
    """Yield the neighbours of a Plan, each once, without regard to memory."""
    seen = {plan}
    for each in (*_in_settings(space, plan), *moved(space, plan)):
        if each not in seen:
            seen.add(each)
            yield each


def moved(space: Space, plan: SettledPlan, only: str | None = None) -> Iterator[SettledPlan]:
    """Yield the Plans with a factor of two moved from one degree to another, and the nearest micro-batch.

    Args:
        space: The space of Plans.
        plan: The Plan.
        only: A degree that must change; None for any.
    """
    legal = space.is_legal
    for less in _DEGREES:
        for more in _DEGREES:
            if less == more or getattr(plan, less) % 2 or (only is not None and only not in (less, more)):
                continue
            degrees = {less: getattr(plan, less) // 2, more: 2 * getattr(plan, more)}
            for microbatch in dict.fromkeys(
                (plan.microbatch, max(1, plan.microbatch // 2), 2 * plan.microbatch)
            ):
                found = changed(plan, space.batch, **_fitting(plan, degrees), microbatch=microbatch)
                if found is not None and legal(found):
                    yield found
    if plan.ep > 1 or space.workload.experts:
        for ep in half_and_twice(plan.ep):
            found = changed(plan, space.batch, ep=ep)
            if only in (None, "ep") and found is not None and legal(found):
                yield found


def _in_settings(space: Space, plan: SettledPlan) -> Iterator[SettledPlan]:
    changes: list[dict[str, Any]] = [{"microbatch": each} for each in half_and_twice(plan.microbatch)]
    changes += [{"recompute": each} for each in RECOMPUTES]
    if plan.dp * plan.cp > 1:
        changes += [{"bucket": each} for each in ALL_SIZES]
        changes += [
            {"shard": shard, "replicate": replicate}
            for shard in CHOICES["shard"]
            for replicate in (divisors(plan.dp) if shard != "none" else [1])
        ]
    if plan.tp > 1:
        changes += [{"tensor": each} for each in CHOICES["tensor"]]
    changes += [{"order": order} for order in orders(plan)]
    if plan.cp > 1:
        changes += [{"context": each} for each in CHOICES["context"]]
    if plan.pp > 1:
        layers = len(space.workload.layers)
        for name in NAMES:
            kind = KINDS[name]
            most = layers // plan.pp if kind.most_virtual is None else kind.least_virtual
            for virtual in range(kind.least_virtual, most + 1):
                given = None if virtual == kind.least_virtual else virtual
                for split in ("cost", "count"):
                    changes.append({"schedule": name, "virtual": given, "split": split})
    for change in changes:
        found = changed(plan, space.batch, **change)
        if found is not None and space.is_legal(found):
            yield found


def changed(plan: SettledPlan, batch: int, **changes: Any) -> SettledPlan | None:
    """Return the Plan with some settings changed; None if it is not legal for a batch of so many samples.

    Shares suit a micro-batch and a mesh: where these change, all ranks get equally many micro-batches.
    """
    if plan.shared is not None and "shares" not in changes and not _KEEPING_SHARES.issuperset(changes):
        changes["shares"] = EQUAL
    try:
        found = SettledPlan.of(plan.replace(**changes), batch)
        if found.pp > 1:
            found.require_micro_batches(found.microbatches_of(batch))
    except PlanError:
        return None
    return found


def orders(plan: SettledPlan) -> list[str]:
    """Return the orders of a Plan's axes over the ranks; none if it has one axis alone."""
    if sum(getattr(plan, name) > 1 for name in _DEGREES) <= 1:
        return []
    return ["-".join(each) for each in itertools.permutations(DEFAULT_ORDER.split("-"))]


def half_and_twice(value: int) -> list[int]:
    """Return a degree or size, halved if that is whole, and doubled."""
    return [*([value // 2] if value % 2 == 0 else []), 2 * value]


def _fitting(plan: SettledPlan, degrees: dict[str, int]) -> dict[str, Any]:
    """Return degrees with what depends on them: replicas of the state, stages and their split."""
    found: dict[str, Any] = dict(degrees)
    dp, pp = degrees.get("dp", plan.dp), degrees.get("pp", plan.pp)
    if dp % plan.replicate:
        found["replicate"] = plan.replicate // 2 if plan.replicate % 2 == 0 else 1
    if "pp" in degrees:
        found["split"] = "cost"
        if pp == 1:
            found |= {"schedule": "1f1b", "virtual": None}
        elif kind_of(plan.schedule).most_virtual is None:
            found["virtual"] = None
    return found
