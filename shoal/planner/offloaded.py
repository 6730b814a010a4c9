"""Plans with part of the state outside of the devices, if they are quicker than the best without.

A Plan is slower with `offload` than without. So `offload` gains time only where memory is short: it makes
room for less sharding or recompute, or a larger micro-batch. First a bound is asked: the best Plan without a
limit of memory, and the least that an update outside of the devices takes longer. Only if both together are
quicker than the best Plan that fits, the Plans with that `offload` are searched, each with its own memory and
seconds. A Plan with `offload` is taken if its step is quicker by LEAST_GAIN, or if none fits without.

Places whose rates are not known are not candidates. Gradients, parameters and activations go to files on
CPUs alone, as the runtime does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from shoal.cluster import Cluster
from shoal.cost import Costs
from shoal.cost.time import update_outside
from shoal.errors import ClusterError
from shoal.plan import FULLY_SHARDED, SettledPlan
from shoal.planner.polish import LEAST_GAIN
from shoal.planner.search import Search
from shoal.planner.sized import Fitted
from shoal.workload import Parameters

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
