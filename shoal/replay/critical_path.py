"""The critical path: the chain of work and transfers, across ranks, that gives the end of the steps.

It is followed back from the last end. Where a rank waited for a collective, the path goes through the
transfer to the rank that arrived last, or to the collective before it in the group.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.replay.graph import Arrive, Await, Work
from shoal.replay.play import Played


@dataclass(frozen=True, slots=True)
class OnPath:
    """A part of the critical path.

    Attributes:
        rank: The rank that works; None for a transfer.
        group: The ranks of a transfer; empty for work.
        what: The kind of the work, or the operation of the transfer.
        seconds: Seconds of the path, in all steps.
    """

    rank: int | None
    group: tuple[int, ...]
    what: str
    seconds: float


def critical_path(played: Played) -> list[OnPath]:
    """Return the parts of the critical path, summed up by rank and kind or by group and operation.

    The largest come first. Their sum is the time from the start of the rank on which the path begins.
    """
    graph = played.graph
    arrivals = {
        (rank, event.collective): position
        for rank, program in graph.programs.items()
        for position, event in enumerate(program)
        if isinstance(event, Arrive)
    }
    sums: dict[tuple[int | None, tuple[int, ...], str], float] = {}

    def add(rank: int | None, group: tuple[int, ...], what: str, seconds: float) -> None:
        sums[rank, group, what] = sums.get((rank, group, what), 0.0) + seconds

    rank = max(played.stops, key=lambda each: played.stops[each][-1] if played.stops[each] else 0.0)
    position = len(graph.programs[rank]) - 1
    while position >= 0:
        event = graph.programs[rank][position]
        before = played.stops[rank][position - 1] if position else graph.starts[rank]
        if isinstance(event, Work):
            add(rank, (), event.kind, event.seconds)
        elif isinstance(event, Await) and played.ends[event.collective][rank] > before:
            number, end = event.collective, played.ends[event.collective][rank]
            while True:
                each, begin = graph.collectives[number], played.begins[number]
                add(None, each.group, each.name.partition(":")[0], end - begin)
                last = max(played.arrivals[number], key=lambda other: played.arrivals[number][other])
                if each.after is None or played.arrivals[number][last] >= begin:
                    break
                number, end = each.after, begin
            rank, position = last, arrivals[last, number]
        position -= 1
    found = [OnPath(*key, seconds) for key, seconds in sums.items() if seconds > 0]
    return sorted(found, key=lambda part: -part.seconds)
