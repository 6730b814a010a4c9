"""Simulate the best Plans: with their real schedule tables and overlap.

A search compares Plans by the closed form of `shoal.cost.time.step`. Then the simulator plays a step of each
Plan that was found, and the Plans are sorted by its result. One action takes some tens of microseconds, so
this is done only if all their tables together have at most MOST_ACTIONS actions. Otherwise all keep the
closed form, as the two kinds of seconds cannot be compared.

schedule=search is not in the search's space: it is made for known times, and takes a second. The best Plan
with a pipeline is tried with it, with one and with two stages on a rank, and with as many activations as fit,
if stages x micro-batches are at most MOST_SEARCHED. It is taken if it makes the Plan's step quicker by
LEAST_GAIN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from shoal.cost import Layout
from shoal.plan import SettledPlan
from shoal.plan.schedules import FOUND
from shoal.planner.candidate import Candidate
from shoal.planner.search import Search
from shoal.planner.space import HybridSharding, Variant
from shoal.simulate import simulate

__all__ = ["LEAST_GAIN", "MOST_ACTIONS", "MOST_SEARCHED", "refined", "with_found_schedule"]

MOST_ACTIONS = 20_000
MOST_SEARCHED = 512
LEAST_GAIN = 0.01


def refined(candidates: Sequence[Candidate], key: Callable[[Candidate], float]) -> list[Candidate]:
    """Simulate the Plans and sort them, best first; return them unchanged if their tables are too large.

    Args:
        candidates: The Plans, best first.
        key: The value to minimise.
    """
    if sum(_actions(candidate.plan, candidate.batch) for candidate in candidates) > MOST_ACTIONS:
        return sorted(candidates, key=key)
    return sorted(map(_played, candidates), key=key)


def with_found_schedule(search: Search, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Search a schedule for the best Plan with a pipeline; return the Plans best first.

    Args:
        search: The search that found them.
        candidates: The Plans, best first. They are returned unchanged if they were not simulated.
    """
    best = next((each for each in candidates if each.plan.pp > 1), None)
    if best is None or best.simulated is None:
        return list(candidates)
    found = min(_with_searched(search, best), key=lambda each: each.seconds, default=best)
    if found.seconds > (1 - LEAST_GAIN) * best.seconds:
        return list(candidates)
    changed = [found if each is best else each for each in candidates]
    return sorted(changed, key=lambda each: each.seconds)


def _with_searched(search: Search, best: Candidate) -> Iterator[Candidate]:
    """Yield the Plan with schedule=search, simulated, for each number of stages on a rank."""
    plan, layers = best.plan, len(search.workload.layers)
    count = plan.microbatches_of(best.batch)
    for virtual in (1, 2):
        if plan.pp * virtual > layers or plan.pp * virtual * count > MOST_SEARCHED:
            continue
        variant = Variant(best.degrees, Layout.of(plan), count, FOUND, virtual)
        split = search.shared.split(variant)
        with_split = search.shared.plan(variant, HybridSharding(plan.sharding, plan.replicate), split)
        candidate = _roomiest(search, with_split.replace(bucket=plan.bucket), virtual, count)
        if candidate is not None:
            yield _played(candidate)


def _roomiest(search: Search, plan: SettledPlan, virtual: int, count: int) -> Candidate | None:
    """Return the Plan with the most activations that fit; None if one micro-batch's do not fit."""
    memories, batch = search.shared.memories, search.batch

    def peak(activations: int) -> float:
        return memories.fullest(plan.replace(activations=activations), batch).peak

    low, high = virtual - 1, virtual * count
    while low < high:
        middle = (low + high + 1) // 2
        if peak(middle) <= search.room:
            low = middle
        else:
            high = middle - 1
    if low < virtual:
        return None
    plan = plan.replace(activations=low)
    return search.candidate(plan, memories.fullest(plan, batch))


def _actions(plan: SettledPlan, batch: int) -> int:
    """Count the actions in the table of a step."""
    halves = 3 if plan.pp > 1 and plan.has_halves else 2
    return (plan.stages if plan.pp > 1 else 1) * plan.microbatches_of(batch) * halves


def _played(candidate: Candidate) -> Candidate:
    """Return the candidate with simulated seconds."""
    played = simulate(candidate.workload, candidate.cluster, candidate.plan, candidate.batch)
    return replace(candidate, simulated=played.seconds)
