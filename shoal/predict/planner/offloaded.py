"""Plans with part of the state outside of the devices, if they are quicker than the best without.

A Plan is slower with `offload` than without. So `offload` gains time only where memory is short: it makes
room for less sharding or recompute, or a larger micro-batch. First a bound is asked: the best Plan without a
limit of memory, and the least that an update outside of the devices takes longer. Only if both together are
quicker than the best Plan that fits, the Plans with that `offload` are searched, each with its own memory and
seconds. A Plan with `offload` is taken if its step is quicker by LEAST_GAIN, or if none fits without.

Places whose rates are not known are not candidates. Gradients, parameters and activations go to files on
CPUs alone, as the runtime does.

The cheapest way to fit, block by block: keep activations, make them again, or put them in files.

A search knows recompute of all blocks or of none, and activations of all blocks in files or of none. Here the
best Plan gets each in as few blocks as fit: for each recompute policy, and each number of blocks in files,
the fewest that must be recomputed, or all. The quickest of these is taken. Plans near it are tried too: those
with another sharding, with half and twice the micro-batch, and where activations may be in files with other
states in files, if their bound with all activations kept is less than the best Plan's seconds.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from shoal.errors import ClusterError
from shoal.predict.cost import Costs
from shoal.predict.cost.time import update_outside
from shoal.predict.planner.refine import LEAST_GAIN, changed, half_and_twice
from shoal.predict.planner.search import Search
from shoal.predict.planner.space import RECOMPUTES, Degrees
from shoal.predict.planner.tree import Fitted
from shoal.spec.cluster import Cluster
from shoal.spec.plan import FULLY_SHARDED, OFFLOADED, SettledPlan
from shoal.spec.workload import Parameters

_ON_GPUS = ("optimizer:host", "optimizer:file")
STATES_ON_CPUS = (
    "optimizer:file",
    "optimizer:file+gradients:file",
    "optimizer:file+gradients:file+parameters:file",
)
"""The states that CPUs keep in files: each with those that must go with it."""

_ACTIVATIONS = "activations:file"


def quicker_outside(search: Search, best: Fitted | None) -> tuple[Search, Fitted] | None:
    """Return the quickest Plan with `offload`, and the search that found it.

    Args:
        search: The search for Plans without.
        best: The best Plan without; None if none fits.

    Returns:
        None if no such Plan is quicker by LEAST_GAIN, or fits.
    """
    options = sorted(_options(search))
    if not options:
        return None
    limit, quickest = math.inf, 0.0
    if best is not None:
        limit = (1 - LEAST_GAIN) * best.seconds
        roomier = search.best(1, room=math.inf, below=limit - options[0][0]).found
        if not roomier:
            return None
        quickest = (1 - LEAST_GAIN / 2) * roomier[0].seconds  # no Plan is quicker: see SLACK
    taken = None
    for longer, _, offload in options:
        if quickest + longer >= limit:
            continue
        outside = search.outside(offload)
        found = outside.best(1, below=limit).found
        if found and found[0].seconds < limit:
            taken, limit = (outside, found[0]), (1 - LEAST_GAIN) * found[0].seconds
    return taken


def stores_activations(cluster: Cluster) -> bool:
    """Return whether activations may be in files: on CPUs whose files have a known rate."""
    return cluster.cores > 0 and cluster.host.file_bandwidth > 0


def unknown_rates(cluster: Cluster) -> tuple[str, ...]:
    """Return the rates that are not known, for lack of which some `offload` is no candidate."""
    host, rates = cluster.host, {"host.file_bandwidth": cluster.host.file_bandwidth}
    if not cluster.cores:
        rates = {
            "device.host_bandwidth": cluster.device.host_bandwidth,
            "host.bandwidth": host.bandwidth,
            **rates,
        }
    return tuple(name for name, rate in rates.items() if not rate)


def _options(search: Search) -> Iterator[tuple[float, int, str]]:
    """Yield each `offload` whose rates are known: the least that it adds to a step, its parts, and itself."""
    workload, cluster = search.workload, search.cluster
    owned = workload.parameters / cluster.devices
    every: Sequence[str] = _ON_GPUS
    if cluster.cores:
        every = _ACTIVATIONS, *STATES_ON_CPUS, *(f"{each}+{_ACTIVATIONS}" for each in STATES_ON_CPUS)
    for number, offload in enumerate(every):
        plan = SettledPlan(microbatch=1, shard=FULLY_SHARDED.name, offload=offload)
        try:
            seconds = [_longer(each, plan, owned) for each in search.shared.costs.all_at()]
        except ClusterError:  # a rate is not known
            continue
        yield min(seconds), number, offload


def _longer(costs: Costs, plan: SettledPlan, owned: float) -> float:
    """Return the seconds by which the update of so many elements is longer with a Plan's `offload`."""
    held = Parameters(divided=round(owned))
    update = costs.update(SettledPlan(microbatch=1), held)
    return update_outside(costs.cluster, plan, owned, update) - update


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
