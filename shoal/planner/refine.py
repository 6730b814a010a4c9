"""The best Plans looked at once more, by the simulator: with their real tables and what really overlaps.

A search compares Plans by the closed form of `shoal.cost.time.step`. Each step of those that it found is
played, and they are put in the order of what that gives. To play an action takes some tens of microseconds,
so it is done if the tables of all of them have no more than MOST_ACTIONS together; else all keep the closed
form, as seconds of two kinds do not compare.

schedule=search is no part of the search's space: it is made for times that are known, and takes a second. The
best Plan with a pipeline is tried with it, with one and with two stages on a rank, and with as many
activations as there is room for, where stages x micro-batches are MOST_SEARCHED at most. It is taken if that
makes the Plan's step quicker by LEAST_GAIN.
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
    """Play the Plans and sort them again, best first; return them as they are if their tables are too large.

    Args:
        candidates: Best first.
        key: What is to be least.
    """
    if sum(_actions(candidate.plan, candidate.batch) for candidate in candidates) > MOST_ACTIONS:
        return sorted(candidates, key=key)
    return sorted(map(_played, candidates), key=key)


def with_found_schedule(search: Search, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Search a schedule for the best Plan with a pipeline; return the Plans best first.

    Args:
        search: That found them.
        candidates: Best first. They stay as they are if they were not played.
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
    """The Plan with schedule=search, played, by stages on a rank."""
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
    """With the most activations for which there is room, none if there is not for one micro-batch's."""
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
    """With the seconds of its step when it is played."""
    played = simulate(candidate.workload, candidate.cluster, candidate.plan, candidate.batch)
    return replace(candidate, simulated=played.seconds)
