"""Explain the best Plan: what bounds it, the effect of each degree, what loses, and what to change.

Every figure is one of a Plan that was played. With one degree at half or twice its value, the best Plan is
searched among those in which a factor of two moves between that degree and one other. On a machine with one
property doubled the best Plan is looked for among the Plans that were played before and their neighbours: so
what it gains is gained at least. No figure is a rule of thumb.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from shoal.cluster import Cluster, devices_of
from shoal.cost import Layout
from shoal.cost.outlook import band_between
from shoal.cost.time import compute_parts
from shoal.plan import SettledPlan
from shoal.planner.candidate import Candidate
from shoal.planner.explanation import Change, Explanation, Neighbour
from shoal.planner.neighbours import half_and_twice, moved, neighbours
from shoal.planner.offloaded import unknown_rates
from shoal.planner.polish import simplest
from shoal.planner.proportion import with_shares
from shoal.planner.search import LOOSE, Search
from shoal.planner.sized import Fitted
from shoal.planner.sizes import sizes_of
from shoal.planner.space import Degrees
from shoal.planner.unequal import unequal
from shoal.simulate import traffic_of
from shoal.workload import Block

_MOST_PLAYED = 6
"""Plans that are played on a changed machine, those of the least bounds."""


def explain(
    search: Search, winner: Candidate, shown: Sequence[Candidate], resident: Candidate | None
) -> Explanation:
    """Explain the best Plan of a search, by comparison with others.

    Args:
        search: The search that found it.
        winner: The best Plan.
        shown: All Plans that are shown, best first.
        resident: The best Plan without `offload`; None if none fits.
    """
    unlimited = _roomier(search, winner, math.inf)
    kind = _kind(winner.degrees)
    between = band_between(winner.cluster)
    within = 1 / between.low - 1 if between is not None else 0.0
    return Explanation(
        winner,
        search.room,
        unlimited,
        tuple(_neighbours(search, winner)),
        next((each for each in shown if _kind(each.degrees) != kind), None),
        len(shown),
        tuple(_changes(search, winner)),
        tuple(sizes_of(search, winner)),
        between,
        search.candidate(simplest(search, Fitted(winner.plan, winner.memory, winner.seconds), within)),
        sum(each.seconds < (1 + within) * winner.seconds for each in shown) - 1,
        _coarser(search, winner),
        _compute(search, winner),
        traffic_of(winner.workload, winner.cluster, winner.plan, winner.batch),
        unequal(search, winner),
        resident,
        unknown_rates(search.cluster),
    )


def _compute(search: Search, winner: Candidate) -> Mapping[str, float]:
    """Return what the compute of the rank that waits least is made of, in seconds of a step."""
    alike = search.shared.costs.alike(winner.plan, winner.batch)
    costs, plan, batch, *_ = max(alike, key=lambda each: each.costs.least(each.plan, each.batch))
    count = plan.microbatches_of(batch)
    held: list[list[Block]] = [[] for _ in range(plan.pp)]
    placement = plan.placement if plan.pp > 1 else (0,)
    for place, blocks in zip(placement, costs.blocks_of(plan, count), strict=True):
        held[place] += blocks
    each = [
        compute_parts(costs.at(plan, place), blocks, Layout.of(plan)) for place, blocks in enumerate(held)
    ]
    totals = [sum(parts.values()) for parts in each]
    busiest, mean = max(range(len(each)), key=totals.__getitem__), sum(totals) / len(totals)
    parts = {name: count * seconds for name, seconds in each[busiest].items()}
    excess = totals[busiest] - mean
    if excess > 0:
        share = 1 - excess / totals[busiest]
        parts = {name: seconds * share for name, seconds in parts.items()} | {"imbalance": count * excess}
    return parts


def _coarser(search: Search, winner: Candidate) -> Candidate | None:
    """Return the best of the Plans that were played with precision=fp8, which splits no products."""
    if search.precision is not None or any("fp8" not in device.peak for device in devices_of(search.cluster)):
        return None
    shared, batch = search.shared, search.batch
    pool = (winner.plan, *shared.known, *moved(shared.space, winner.plan, "tp"))
    plans = {plan.replace(precision="fp8", split=plan.split) for plan in pool if plan.tp == 1}
    bounded = sorted((shared.costs.least(plan, batch), str(plan), plan) for plan in plans)
    fitting = [
        plan for _, _, plan in bounded[: 4 * _MOST_PLAYED] if shared.fullest(plan).required <= search.room
    ]
    best = min(fitting[:_MOST_PLAYED], key=shared.played, default=None)
    if best is None or shared.played(best) >= winner.seconds:
        return None
    return search.candidate(Fitted(best, shared.fullest(best), shared.played(best)))


def _neighbours(search: Search, winner: Candidate) -> Iterator[Neighbour]:
    space = search.shared.space
    for name in Degrees._fields:
        value = getattr(winner.degrees, name)
        near = {Degrees.of(plan) for plan in moved(space, winner.plan, name)}
        for other in half_and_twice(value):
            wanted = {degrees for degrees in near if getattr(degrees, name) == other}
            if wanted:
                ranking = search.best(1, wanted.__contains__, slack=LOOSE)
                found = [*ranking.found, *with_shares(search, 1, wanted.__contains__)]
                if ranking.legal:
                    best = min(found, key=lambda each: each.seconds, default=None)
                    yield Neighbour(name, other, None if best is None else search.candidate(best))


def _changes(search: Search, winner: Candidate) -> list[Change]:
    """Return what each doubled property gains, most first."""
    space, shared = search.shared.space, search.shared
    # A split by the cost of every block is slow to find, and hardly better than one by their mean.
    near = (plan for plan in neighbours(space, winner.plan) if plan.pp == 1 or plan.split != "cost")
    pool = dict.fromkeys((winner.plan, *shared.known, *near))
    fitting = [plan for plan in pool if shared.fullest(plan).required <= search.room]
    machines = dict(_doubled(search.cluster))
    asked = [(cluster, fitting) for cluster in machines.values()]
    found = search.each(_best_on, asked, [bool(number % 2) for number in range(len(asked))])
    changes = [
        Change(name, search.on(cluster).candidate(best))
        for (name, cluster), best in zip(machines.items(), found, strict=True)
    ]
    changes.append(Change("the memory", _roomier(search, winner, 2 * search.room)))
    return sorted(changes, key=lambda change: change.best.seconds)


def _roomier(search: Search, winner: Candidate, room: float) -> Candidate:
    """Return the best Plan with more memory, of those with degrees of half to twice the winner's."""

    def accept(degrees: Degrees) -> bool:
        pairs = zip(degrees, winner.degrees, strict=True)
        return all(each <= 2 * other and other <= 2 * each for each, other in pairs)

    best = search.resident.best(1, accept, room, LOOSE).best
    return winner if best is None or best.seconds >= winner.seconds else best


def _best_on(search: Search, asked: tuple[Cluster, Sequence[SettledPlan]]) -> Fitted:
    """Return the best on another machine with equal memory: of the first Plan and those of least bounds."""
    cluster, plans = asked
    other = search.on(cluster).shared
    bounded = sorted((other.costs.least(plan, search.batch), str(plan), plan) for plan in plans[1:])
    best, seconds = plans[0], other.played(plans[0])
    for least, _, plan in bounded[:_MOST_PLAYED]:
        if least < (1 - LOOSE) * seconds and other.played(plan) < seconds:
            best, seconds = plan, other.played(plan)
    return Fitted(best, search.shared.fullest(best), seconds)


def _doubled(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """Yield the machine with one property doubled, except memory, which a search takes directly."""
    inner, *outer = cluster.levels
    twice = [replace(level, bandwidth=2 * level.bandwidth) for level in outer]
    if outer:
        yield "the network's rate", cluster.replace(levels=(inner, *twice))
    if inner.devices > 1:
        faster = replace(inner, bandwidth=2 * inner.bandwidth)
        yield "the rate of the links in a node", cluster.replace(levels=(faster, *outer))
    is_whole = all(level.devices % (2 * inner.devices) == 0 for level in outer)
    if outer and is_whole and not (cluster.failed or cluster.spare):
        wider = replace(inner, devices=2 * inner.devices)
        yield "the devices in a node", cluster.replace(levels=(wider, *outer))
    yield (
        "the FLOP/s",
        cluster.with_each_device(
            lambda device: replace(device, peak={name: 2 * rate for name, rate in device.peak.items()})
        ),
    )
    yield (
        "the memory's rate",
        cluster.with_each_device(lambda device: replace(device, bandwidth=2 * device.bandwidth)),
    )


def _kind(degrees: Degrees) -> frozenset[str]:
    """Return the techniques that a layout uses beside data parallelism."""
    return frozenset(name for name in Degrees._fields if name != "dp" and getattr(degrees, name) > 1)
