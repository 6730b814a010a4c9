"""How late each rank comes to the collectives of a step: the figure that an all-reduce cannot equalise."""

from __future__ import annotations

from collections import Counter
from statistics import median

from shoal.timeline import Timeline
from shoal.timeline.matching import Arrival, match_collectives
from shoal.timeline.windows import StepWindows

Collective = dict[int, Arrival]
"""One collective: by rank, its span and the time at which all had come."""


def collectives_by_step(timeline: Timeline) -> dict[int, list[Collective]]:
    """Return the collectives of each step of two or more ranks, in the order of their first start."""
    windows = {rank: steps for rank in timeline.ranks if (steps := StepWindows(timeline, rank))}
    found: dict[tuple[int, tuple[int, ...], str, int], Collective] = {}
    for rank, arrivals in match_collectives(timeline, windows).items():
        seen: Counter[tuple[int, tuple[int, ...], str]] = Counter()
        for arrival in arrivals:
            key = (arrival.step, arrival.span.group, arrival.span.name)
            found.setdefault((*key, seen[key]), {})[rank] = arrival
            seen[key] += 1
    by_step: dict[int, list[Collective]] = {}
    for (step, *_), collective in found.items():
        if len(collective) > 1:
            by_step.setdefault(step, []).append(collective)
    for collectives in by_step.values():
        collectives.sort(key=lambda each: min(arrival.span.start for arrival in each.values()))
    return by_step


def lateness(collectives: list[Collective]) -> dict[int, float]:
    """Return, by rank, the seconds by which it came after the middle rank, at the collective where most."""
    late: dict[int, float] = {}
    for collective in collectives:
        middle = median(arrival.span.start for arrival in collective.values())
        for rank, arrival in collective.items():
            late[rank] = max(late.get(rank, 0.0), arrival.span.start - middle)
    return late
