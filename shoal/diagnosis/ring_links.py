"""Slow links within one group, from the times at which a ring's ranks end.

All ranks of a ring wait for its slowest link, so the length of a collective tells nothing about whose link it
is. Their ends do. Let a transfer of one part take T seconds over the link from rank i to i + 1, and t over
all others. In the last step rank i + 1 receives its part last, since its link has been late in each of the s
steps. What rank i + 2 receives then was ready one step earlier, and so on round the ring of n ranks:

    rank i + 1 + k ends at (s - k) T + k t,     k = 0 ... n - 1
    (last end - first end) / last end = (n - 1) / s * (1 - t / T)

So the rank that ends last has the slow link before it, and its neighbour before, at the other end of that
link, ends first. If a cable is slow both ways, two links are: those of the rank between the one that ends
first and the one that ends last. A ring of all ranks in order is what the algorithm "ring" of a Timeline is:
s is 2 (n - 1) for an all-reduce and n - 1 for others. Parts that go round in several laps show less.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from shoal.diagnosis.own_work import OwnWork
from shoal.diagnosis.policy import Policy
from shoal.diagnosis.series import errors_from_zero
from shoal.diagnosis.straggler import Straggler
from shoal.timeline import Meeting
from shoal.timeline.intervals import intersect, length
from shoal.units import format_bytes

__all__ = ["find_slow_ring_links", "is_ring"]

_FEWEST_RANKS = 3
"""A ring of two has one pair of ranks."""
_CLOCK_ERRORS = 3.0
"""Times the error of the clocks by which the ends must differ."""


@dataclass(slots=True)
class _Rings:
    """The largest collectives of a group of one operation and size, summed by step.

    Attributes:
        ends: By rank and step, seconds from the last arrival to the end.
        exposed: By step, the seconds in which ranks are idle meanwhile: the mean over ranks.
        count: Number of collectives.
    """

    ends: dict[int, dict[int, float]] = field(default_factory=dict)
    exposed: dict[int, float] = field(default_factory=dict)
    count: int = 0


def is_ring(meeting: Meeting) -> bool:
    """Return whether a collective went round a ring whose ends can be told apart."""
    return (
        meeting.is_whole
        and len(meeting.group) >= _FEWEST_RANKS
        and all(span.algorithm == "ring" for span in meeting.spans.values())
    )


def find_slow_ring_links(
    met: Iterable[Meeting],
    works: Mapping[int, OwnWork],
    steps: Sequence[int],
    policy: Policy,
    clock_error: float = 0.0,
) -> list[Straggler]:
    """Return the slow links of rings, one for each group at most, the most expensive first.

    Args:
        met: The collectives of the steps.
        works: The own work of each rank.
        steps: The steps to judge.
        policy: The thresholds.
        clock_error: Seconds by which the clocks of ranks may differ.
    """
    rings: dict[tuple[tuple[int, ...], str, int], _Rings] = {}
    ended: dict[tuple[int, ...], float] = {}
    for meeting in sorted((each for each in met if each.is_whole), key=lambda each: each.complete):
        begin = max(meeting.complete, ended.get(meeting.group, meeting.complete))
        stop = max(span.stop for span in meeting.spans.values())
        ended[meeting.group] = stop
        if not is_ring(meeting) or begin >= stop:
            continue
        span = next(iter(meeting.spans.values()))
        ring = rings.setdefault((meeting.group, span.name.partition(":")[0], span.bytes), _Rings())
        ring.count += 1
        for rank, each in meeting.spans.items():
            by_step = ring.ends.setdefault(rank, {})
            by_step[meeting.step] = by_step.get(meeting.step, 0.0) + max(each.stop - begin, 0.0)
        exposed = fmean(
            length(intersect(works[rank].steps[meeting.step].idle, [(begin, stop)])) for rank in meeting.spans
        )
        ring.exposed[meeting.step] = ring.exposed.get(meeting.step, 0.0) + exposed
    wall = median(work.steps[step].wall for work in works.values() for step in steps)
    found: dict[tuple[int, ...], Straggler] = {}
    for (group, operation, nbytes), ring in rings.items():
        least = _CLOCK_ERRORS * clock_error * ring.count / len(steps)
        slow = _slow(group, operation, nbytes, ring, steps, wall, policy, least)
        if slow is not None and (group not in found or slow.seconds > found[group].seconds):
            found[group] = slow
    return sorted(found.values(), key=lambda each: -each.seconds)


def _slow(
    group: tuple[int, ...],
    operation: str,
    nbytes: int,
    ring: _Rings,
    steps: Sequence[int],
    wall: float,
    policy: Policy,
    least: float,
) -> Straggler | None:
    judged = [step for step in steps if all(step in ring.ends[rank] for rank in group)]
    if len(judged) < policy.fewest_steps:
        return None
    ends = {rank: median(ring.ends[rank][step] for step in judged) for rank in group}
    first, last = min(group, key=lambda rank: ends[rank]), max(group, key=lambda rank: ends[rank])
    ranks = _between(group, first, last)
    if not ranks or ends[last] <= 0:
        return None
    apart = [ring.ends[last][step] - ring.ends[first][step] for step in judged]
    rounds = 2 if operation == "all_reduce" else 1
    lost = min(rounds * median(apart) / ends[last], 1.0)  # 1 - t / T
    if lost < 1 - 1 / policy.slow_link or errors_from_zero(apart) < policy.certainty or median(apart) < least:
        return None
    seconds = lost * median(ring.exposed[step] for step in judged)
    if seconds < policy.late_link * wall:
        return None
    if len(ranks) == 1:
        where = f"the cable of rank {ranks[0]}, or its host, both ways"
    else:
        where = f"the link from rank {first} to rank {last}"
    evidence = (
        f"{operation} of {format_bytes(nbytes)} goes round a ring of ranks {', '.join(map(str, group))}. "
        f"Rank {last} ends {median(apart) * 1e3:.3g} ms after rank {first}, of {ends[last] * 1e3:.3g} ms, as "
        f"it does if {where} takes {1 / max(1 - lost, 0.01):.2g} times as long as the others."
    )
    return Straggler.of_link(ranks, seconds, wall, judged, evidence)


def _between(group: tuple[int, ...], first: int, last: int) -> tuple[int, ...]:
    """Return the two ends of one slow link, or the rank between two; none if it is neither."""
    place, size = group.index(first), len(group)
    if group[(place + 1) % size] == last:
        return first, last
    if group[(place + 2) % size] == last:
        return (group[(place + 1) % size],)
    return ()
