"""How long each rank holds others up: they are idle, and it has not arrived at their collective yet.

A rank is late at a collective if half of the group has arrived and it has not. From then until it arrives it
holds up those that are idle because they wait for this collective. A rank that arrives late holds nobody up
while the others have other work to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shoal.diagnosis.own_work import OwnWork
from shoal.timeline import Meeting
from shoal.timeline.intervals import Intervals, intersect, length, subtract, union


def held_up(meetings: Iterable[Meeting], works: Mapping[int, OwnWork]) -> dict[int, dict[int, float]]:
    """Return the seconds for which each rank held others up, by rank and step.

    Args:
        meetings: The collectives of the steps.
        works: The own work of each rank.
    """
    found: dict[tuple[int, int], Intervals] = {}
    names: dict[tuple[int, int], set[str]] = {}
    whole = [each for each in meetings if each.is_whole and len(each.group) > 1]
    for meeting in whole:
        for rank in meeting.spans:
            names.setdefault((rank, meeting.step), set()).add(meeting.name)
    for meeting in whole:
        arrivals = sorted((span.start, rank) for rank, span in meeting.spans.items())
        half = arrivals[(len(arrivals) - 1) // 2][0]
        for position, (arrival, late) in enumerate(arrivals):
            if arrival <= half:
                continue
            for before, rank in arrivals[:position]:
                moment = max(half, before), min(arrival, meeting.spans[rank].stop)
                if moment[0] < moment[1]:
                    work = works[rank].steps[meeting.step]
                    others = [
                        each
                        for name, waits in work.waits.items()
                        if name != meeting.name and name in names[rank, meeting.step]
                        for each in waits
                    ]
                    idle = subtract(intersect(work.idle, [moment]), union(others))
                    found.setdefault((late, meeting.step), []).extend(idle)
    return {
        rank: {step: length(union(found.get((rank, step), ()))) for step in work.steps}
        for rank, work in works.items()
    }
