"""Slow links: transfers that take longer than the same transfer elsewhere, after all ranks have arrived.

Transfers are alike if they have the same operation, bytes, number of ranks and purpose. A transfer is
compared with alike ones of other groups in the same step, or else with what was predicted for its name. A
group whose transfers are slow has a slow link. If several groups are slow and share one rank, that rank has
the slow link.
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
