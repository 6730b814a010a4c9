"""The cheapest way to fit, block by block: keep activations, make them again, or put them in files.

A search knows recompute of all blocks or of none, and activations of all blocks in files or of none. Here the
best Plan gets each in as few blocks as fit: for each recompute policy, and each number of blocks in files,
the fewest that must be recomputed, or all. The quickest of these is taken. Plans near it are tried too: those
with another sharding, with half and twice the micro-batch, and where activations may be in files with other
states in files, if their bound with all activations kept is less than the best Plan's seconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from shoal.plan import OFFLOADED, SettledPlan
from shoal.planner.neighbours import changed, half_and_twice
from shoal.planner.offloaded import STATES_ON_CPUS
from shoal.planner.search import Search
from shoal.planner.sized import Fitted
from shoal.planner.space import RECOMPUTES, Degrees


def with_cheapest_blocks(search: Search, found: Fitted, *, may_store: bool) -> Fitted:
    """Return the quickest of a Plan and of those near it whose blocks do in each case what is cheapest.

    Args:
        search: The search that found the Plan.
        found: The Plan.
        may_store: Whether activations may be in files.
    """
    shared, best = search.shared, found
    for least, _, plan in _by_bound(search, _near(search, found.plan, may_store)):
        if least >= best.seconds:
            break
        if shared.fullest(plan).required <= search.room:
            continue  # it fits with all activations kept, so a search has looked at it
        for bound, _, lean in _by_bound(search, _leanest(search, plan, may_store)):
            if bound >= best.seconds:
                break
            seconds = shared.played(lean)
            if seconds < best.seconds:
                best = Fitted(lean, shared.fullest(lean), seconds)
    return best


def _by_bound(search: Search, plans: Iterator[SettledPlan]) -> list[tuple[float, str, SettledPlan]]:
    """Return Plans with lower bounds on their seconds, the least first."""
    costs = search.shared.costs
    return sorted((costs.least(plan, search.batch), str(plan), plan) for plan in plans)


def _near(search: Search, plan: SettledPlan, may_store: bool) -> Iterator[SettledPlan]:
    """Yield the Plans near a Plan, with all activations kept."""
    own = str(replace(plan.tiers, activations="device", blocks=None))
    for offload in dict.fromkeys((own, OFFLOADED, *STATES_ON_CPUS)) if may_store else (own,):
        space = replace(search.shared.space, offload=offload)
        for kind, replicate in space.shardings(Degrees.of(plan)):
            for microbatch in (plan.microbatch, *half_and_twice(plan.microbatch)):
                settings = {"shard": kind.name, "replicate": replicate, "microbatch": microbatch}
                near = changed(plan, search.batch, **settings, recompute="none", offload=offload)
                if near is not None and space.is_legal(near):
                    yield near


def _leanest(search: Search, plan: SettledPlan, may_store: bool) -> Iterator[SettledPlan]:
    """Yield, for each policy and number of blocks in files, Plans that fit.

    They are the one with the fewest blocks recomputed, of those that are not in files, and the one in which
    all blocks are: those in files then have less in them.
    """
    layers, shared = len(search.workload.layers), search.shared

    def fits(policy: str, stored: int, number: int) -> bool:
        return shared.fullest(_chosen(plan, layers, policy, number, stored)).required <= search.room

    for policy in RECOMPUTES[1:]:
        for stored in range((layers if may_store else 0) + 1):
            fewest = bisect_left(range(layers - stored), True, key=partial(fits, policy, stored))
            for number in {fewest, layers}:
                if fits(policy, stored, number):
                    yield _chosen(plan, layers, policy, number, stored)


def _chosen(plan: SettledPlan, layers: int, policy: str, recomputed: int, stored: int) -> SettledPlan:
    """Return the Plan with so many blocks recomputed, and so many with activations in files."""
    tiers = plan.tiers
    if stored:
        tiers = replace(tiers, activations="file", blocks=None if stored == layers else stored)
    number = "" if recomputed == layers else f":{recomputed}"
    return plan.replace(recompute=f"{policy}{number}" if recomputed else "none", offload=str(tiers))
