"""The fewest blocks that must be recomputed for a Plan to fit.

A search knows recompute of all blocks or of none. Here the best Plan gets it in as few blocks as fit. Plans
near it are tried too, each with recompute in as few blocks as fit: those with another sharding, and with half
and twice the micro-batch, if their bound without recompute is less than the best Plan's seconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from shoal.plan import SettledPlan
from shoal.planner.neighbours import changed, half_and_twice
from shoal.planner.search import Search
from shoal.planner.sized import Fitted
from shoal.planner.space import RECOMPUTES, Degrees

__all__ = ["with_fewest_recomputed"]


def with_fewest_recomputed(search: Search, found: Fitted) -> Fitted:
    """Return the quickest of a Plan and of those near it with recompute in as few blocks as fit."""
    shared, best = search.shared, found
    bounded = [
        (shared.costs.least(plan, search.batch), str(plan), plan) for plan in _near(search, found.plan)
    ]
    for least, _, plan in sorted(bounded):
        if least >= best.seconds:
            break
        if shared.fullest(plan).required <= search.room:
            continue  # it fits without recompute, so the search has looked at it
        for policy in RECOMPUTES[1:]:
            lean = _leanest(search, plan, policy)
            if lean is not None and shared.costs.least(lean, search.batch) < best.seconds:
                seconds = shared.played(lean)
                if seconds < best.seconds:
                    best = Fitted(lean, shared.fullest(lean), seconds)
    return best


def _near(search: Search, plan: SettledPlan) -> Iterator[SettledPlan]:
    """Yield the Plans near a Plan, without recompute."""
    space = search.shared.space
    for kind, replicate in space.shardings(Degrees.of(plan)):
        for microbatch in (plan.microbatch, *half_and_twice(plan.microbatch)):
            settings = {"shard": kind.name, "replicate": replicate, "microbatch": microbatch}
            near = changed(plan, search.batch, **settings, recompute="none")
            if near is not None and space.is_legal(near):
                yield near


def _leanest(search: Search, plan: SettledPlan, policy: str) -> SettledPlan | None:
    """Return the Plan with this policy in as few blocks as fit; None if it fits with no number."""
    layers = len(search.workload.layers)

    def with_number(number: int) -> SettledPlan:
        return plan.replace(recompute=policy if number == layers else f"{policy}:{number}")

    def fits(number: int) -> bool:
        return search.shared.fullest(with_number(number)).required <= search.room

    if not fits(layers):
        return None
    return with_number(1 + bisect_left(range(1, layers), True, key=fits))
