"""Slow links: transfers that take longer than the same transfer elsewhere, after all ranks have arrived.

Transfers are alike if they have the same operation, bytes, number of ranks and purpose. A transfer is
compared with alike ones of other groups in the same step, or else with what was predicted for its name. A
group whose transfers are slow has a slow link. If several groups are slow and share one rank, that rank has
the slow link.

Slow links within one group, from the times at which a ring's ranks end.

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

Links within a host are quicker than those between hosts, so ranks that share a host are one place of the
ring. In the algorithm "hierarchical" the ring is one of hosts, which end when their ranks do, in the mean.
A ring of all ranks passes through each of k hosts by g ranks, where a host ends when its first rank does:
it receives from another host. If a part takes no time within a host, then

    first end / last end = max(t / T, 1 - (k - 1) (g - t / T) / s)

which is the formula above where g is 1. If it takes some, t / T is overestimated, and so less is claimed.

Other algorithms are not judged. In a double tree each part goes up to the root and down again, so that one
slow link makes all ranks late.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from shoal.analyze.diagnosis.compute_time import OwnWork, Policy, errors_from_zero
from shoal.analyze.diagnosis.straggler import Straggler
from shoal.spec.timeline import Meeting
from shoal.spec.timeline.intervals import intersect, length
from shoal.units import format_bytes

_Group = tuple[int, ...]
_Class = tuple[str, int, int, str]
"""Operation, bytes, number of ranks, purpose."""


@dataclass(slots=True)
class _Transfers:
    """The transfers of one class in one group.

    Attributes:
        seconds: Seconds from the last arrival to the last end, summed by step.
        exposed: Seconds of these in which a rank is idle, summed by step: the mean over ranks.
        predicted: Seconds predicted for them by step.
        is_predicted: Whether each of them was predicted.
    """

    seconds: dict[int, float] = field(default_factory=dict)
    exposed: dict[int, float] = field(default_factory=dict)
    predicted: dict[int, float] = field(default_factory=dict)
    is_predicted: bool = True


@dataclass(frozen=True, slots=True)
class _Slow:
    """A group whose transfers of one class are slow."""

    group: _Group
    kind: _Class
    ratio: float
    seconds: float
    exposed: float
    against: str


def find_slow_links(
    meetings: Iterable[Meeting],
    works: Mapping[int, OwnWork],
    steps: Sequence[int],
    policy: Policy,
    predicted: Mapping[str, float] | None = None,
) -> list[Straggler]:
    """Return the slow links, the most expensive first.

    Args:
        meetings: The collectives of the steps.
        works: The own work of each rank.
        steps: The steps to judge.
        policy: The thresholds.
        predicted: Seconds of a transfer that a model predicts, by the name of its collective.
    """
    found = _transfers(meetings, works, set(steps), predicted or {}, policy)
    wall = median(work.steps[step].wall for work in works.values() for step in steps)
    slow, normal = [], set[_Group]()
    for kind, groups in found.items():
        for group, transfers in groups.items():
            each = _slow(kind, group, transfers, groups, steps, policy)
            if each is not None:
                slow.append(each)
            elif len(groups) > 1:
                normal.add(group)
    by_group: dict[_Group, list[_Slow]] = {}
    for each in slow:
        by_group.setdefault(each.group, []).append(each)
    cost = sum(each.exposed for each in slow)
    if cost < policy.late_link * wall:
        return []
    return [_link(ranks, slow, wall, len(steps), steps) for ranks in [_at_fault(list(by_group), normal)]]


def _transfers(
    meetings: Iterable[Meeting],
    works: Mapping[int, OwnWork],
    steps: set[int],
    predicted: Mapping[str, float],
    policy: Policy,
) -> dict[_Class, dict[_Group, _Transfers]]:
    found: dict[_Class, dict[_Group, _Transfers]] = {}
    ended: dict[_Group, float] = {}
    whole = [each for each in meetings if each.is_whole and len(each.group) > 1 and each.step in steps]
    for meeting in sorted(whole, key=lambda each: each.complete):
        span = next(iter(meeting.spans.values()))
        stop = max(each.stop for each in meeting.spans.values())
        begin = min(max(meeting.complete, ended.get(meeting.group, meeting.complete)), stop)
        ended[meeting.group] = max(stop, ended.get(meeting.group, stop))
        kind = span.name.partition(":")[0], span.bytes, len(meeting.group), span.purpose
        each = found.setdefault(kind, {}).setdefault(meeting.group, _Transfers())
        step = meeting.step
        each.seconds[step] = each.seconds.get(step, 0.0) + stop - begin
        exposed = fmean(
            length(intersect(works[rank].steps[step].idle, [(begin, stop)])) for rank in meeting.spans
        )
        each.exposed[step] = each.exposed.get(step, 0.0) + exposed
        each.is_predicted &= predicted.get(meeting.name, 0.0) >= policy.least_predicted
        each.predicted[step] = each.predicted.get(step, 0.0) + predicted.get(meeting.name, 0.0)
    return found


def _slow(
    kind: _Class,
    group: _Group,
    transfers: _Transfers,
    groups: Mapping[_Group, _Transfers],
    steps: Sequence[int],
    policy: Policy,
) -> _Slow | None:
    others = [each for other, each in groups.items() if other != group]
    judged = [step for step in steps if step in transfers.seconds]
    if others:
        judged = [step for step in judged if all(step in each.seconds for each in others)]
        normal = [median(each.seconds[step] for each in others) for step in judged]
        against, least = "as the same in other groups", policy.slow_link
    elif transfers.is_predicted:
        normal = [transfers.predicted[step] for step in judged]
        against, least = "as predicted", policy.slow_predicted
    else:
        return None
    if len(judged) < policy.fewest_steps or median(normal) <= 0:
        return None
    measured = [transfers.seconds[step] for step in judged]
    excess = [one - other for one, other in zip(measured, normal, strict=True)]
    ratio = median(measured) / median(normal)
    if ratio < least or errors_from_zero(excess) < policy.certainty:
        return None
    exposed = [min(transfers.exposed[step], more) for step, more in zip(judged, excess, strict=True)]
    return _Slow(group, kind, ratio, median(excess), max(median(exposed), 0.0), against)


def _at_fault(slow: Sequence[_Group], normal: set[_Group]) -> tuple[int, ...]:
    """Return the ranks that may be at fault: in all slow groups, and if possible in no normal one."""
    shared = set(slow[0]).intersection(*slow[1:])
    candidates = shared or set(slow[0]).union(*slow[1:])
    cleared = {rank for rank in candidates if any(rank in group for group in normal - set(slow))}
    return tuple(sorted(candidates - cleared or candidates))


def _link(
    ranks: tuple[int, ...], slow: Sequence[_Slow], wall: float, count: int, steps: Sequence[int]
) -> Straggler:
    seconds = sum(each.exposed for each in slow)
    worst = max(slow, key=lambda each: each.seconds)
    groups = sorted({each.group for each in slow})
    operation, nbytes, _, _ = worst.kind
    named = f"rank {ranks[0]}" if len(ranks) == 1 else f"one of the ranks {', '.join(map(str, ranks))}"
    evidence = (
        f"{operation} of {format_bytes(nbytes)} among ranks {', '.join(map(str, worst.group))} "
        f"takes {worst.ratio:.3g} times as long {worst.against}, after all have arrived. "
        f"{len(groups)} slow group{'s' * (len(groups) > 1)}: the link of {named}."
    )
    return Straggler.of_link(ranks, seconds, wall, steps, evidence)


_FEWEST = 3
"""A ring of two has one pair of ranks or hosts."""
_CLOCK_ERRORS = 3.0
"""Times the error of the clocks by which the ends must differ."""


@dataclass(slots=True)
class _Rings:
    """The collectives of a group of one operation, size and algorithm, summed by step.

    Attributes:
        places: The ranks round the ring, by host if hosts are its places.
        algorithm: The algorithm.
        ends: By rank and step, seconds from the last arrival to the end.
        exposed: By step, the seconds in which ranks are idle meanwhile: the mean over ranks.
        count: Number of collectives.
    """

    places: tuple[tuple[int, ...], ...]
    algorithm: str
    ends: dict[int, dict[int, float]] = field(default_factory=dict)
    exposed: dict[int, float] = field(default_factory=dict)
    count: int = 0


def ring_of(meeting: Meeting, hosts: Mapping[int, str]) -> tuple[tuple[int, ...], ...]:
    """Return the places round the ring of a collective, as the ranks of each; none if its ends tell nothing.

    Args:
        meeting: The collective.
        hosts: By rank, its host; without those that are not known. Ranks of a ring are then taken for hosts
            of their own, and nothing is said of rings of hosts.
    """
    algorithms = {span.algorithm for span in meeting.spans.values()}
    if not meeting.is_whole or not algorithms <= {"ring", "hierarchical"} or len(algorithms) != 1:
        return ()
    if algorithms == {"hierarchical"} and not hosts.keys() >= set(meeting.group):
        return ()
    by_host: dict[str, list[int]] = {}
    for rank in meeting.group:
        by_host.setdefault(hosts.get(rank, f"rank {rank}"), []).append(rank)
    places = tuple(map(tuple, by_host.values()))
    is_even = len({len(place) for place in places}) == 1
    if algorithms == {"ring"} and not (is_even and sum(places, ()) == meeting.group):
        return ()  # its links differ, and so do its ends
    return places if len(places) >= _FEWEST else ()


def find_slow_ring_links(
    met: Iterable[Meeting],
    works: Mapping[int, OwnWork],
    steps: Sequence[int],
    policy: Policy,
    clock_error: float | None = 0.0,
    hosts: Mapping[int, str] | None = None,
) -> list[Straggler]:
    """Return the slow links of rings, one for each group at most, the most expensive first.

    Args:
        met: The collectives of the steps.
        works: The own work of each rank.
        steps: The steps to judge.
        policy: The thresholds.
        clock_error: Seconds by which the clocks of ranks may differ; None if it is not known, so that ends
            cannot be compared.
        hosts: By rank, its host, as far as it is known.
    """
    if clock_error is None:
        return []
    rings: dict[tuple[tuple[int, ...], str, int, str], _Rings] = {}
    ended: dict[tuple[int, ...], float] = {}
    for meeting in sorted((each for each in met if each.is_whole), key=lambda each: each.complete):
        begin = max(meeting.complete, ended.get(meeting.group, meeting.complete))
        stop = max(span.stop for span in meeting.spans.values())
        ended[meeting.group] = stop
        places = ring_of(meeting, hosts or {})
        if not places or begin >= stop:
            continue
        span = next(iter(meeting.spans.values()))
        key = meeting.group, span.name.partition(":")[0], span.bytes, span.algorithm
        ring = rings.setdefault(key, _Rings(places, span.algorithm))
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
    for (group, operation, nbytes, _), ring in rings.items():
        least = _CLOCK_ERRORS * clock_error * ring.count / len(steps)
        slow = _slow_in_ring(operation, nbytes, ring, steps, wall, policy, least)
        if slow is not None and (group not in found or slow.seconds > found[group].seconds):
            found[group] = slow
    return sorted(found.values(), key=lambda each: -each.seconds)


def _slow_in_ring(
    operation: str,
    nbytes: int,
    ring: _Rings,
    steps: Sequence[int],
    wall: float,
    policy: Policy,
    least: float,
) -> Straggler | None:
    judged = [step for step in steps if all(step in ends for ends in ring.ends.values())]
    if len(judged) < policy.fewest_steps:
        return None
    by_step = [_ends(ring, step) for step in judged]
    count = len(ring.places)
    ends = [median(each[place] for each in by_step) for place in range(count)]
    first, last = min(range(count), key=ends.__getitem__), max(range(count), key=ends.__getitem__)
    between = (last - first) % count - 1  # places after the first and before the last
    if between not in (0, 1) or ends[last] <= 0:
        return None
    apart = [each[last] - each[first] for each in by_step]
    later = median(apart) / ends[last]
    through = len(ring.places[0]) if ring.algorithm == "ring" else 1  # ranks of a host
    rounds = (2 if operation == "all_reduce" else 1) * (count * through - 1)
    ratio = max(min(1 - later, through - later * rounds / (count - 1)), 0.0)  # t / T
    lost = 1 - ratio
    if lost < 1 - 1 / policy.slow_link or errors_from_zero(apart) < policy.certainty or median(apart) < least:
        return None
    seconds = lost * median(ring.exposed[step] for step in judged)
    if seconds < policy.late_link * wall:
        return None
    if between:
        at_fault = ring.places[(first + 1) % count]
        where = f"the cable of {_named(at_fault)}{', or its host,' if len(at_fault) == 1 else ''} both ways"
    else:
        at_fault = ring.places[first] + ring.places[last]
        where = f"the link from {_named(ring.places[first])} to {_named(ring.places[last])}"
    evidence = (
        f"{operation} of {format_bytes(nbytes)} goes round a ring of {_listed(ring.places)}. "
        f"{_named(ring.places[last]).capitalize()} ends {median(apart) * 1e3:.3g} ms after "
        f"{_named(ring.places[first])}, of {ends[last] * 1e3:.3g} ms, as it does if {where} takes "
        f"{1 / max(ratio, 0.01):.2g} times as long as the others."
    )
    return Straggler.of_link(at_fault, seconds, wall, judged, evidence)


def _ends(ring: _Rings, step: int) -> list[float]:
    """Return when each place of a ring ends in a step."""
    if ring.algorithm == "ring":
        return [ring.ends[place[0]][step] for place in ring.places]
    return [fmean(ring.ends[rank][step] for rank in place) for place in ring.places]


def _named(place: tuple[int, ...]) -> str:
    if len(place) == 1:
        return f"rank {place[0]}"
    return f"the host of ranks {', '.join(map(str, place))}"


def _listed(places: Sequence[tuple[int, ...]]) -> str:
    if all(len(place) == 1 for place in places):
        return f"ranks {', '.join(str(place[0]) for place in places)}"
    return f"{len(places)} hosts"
