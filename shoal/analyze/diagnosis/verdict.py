"""The verdict on a window of steps: the bottleneck, the stragglers, and what was not measured.

How long each rank holds others up: they are idle, and it has not arrived at their collective yet.

A rank is late at a collective if half of the group has arrived and it has not. From then until it arrives it
holds up those that are idle because they wait for this collective. A rank that arrives late holds nobody up
while the others have other work to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from shoal.analyze.diagnosis.compute_time import POLICY, OwnWork, Policy, own_work
from shoal.analyze.diagnosis.links import find_slow_links, find_slow_ring_links, ring_of
from shoal.analyze.diagnosis.straggler import Straggler, find_stragglers, peers_of
from shoal.spec.timeline import Kind, Meeting, Parts, Timeline, explain, meetings
from shoal.spec.timeline.breakdown import mean
from shoal.spec.timeline.intervals import Intervals, StepWindows, intersect, length, subtract, union


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


class Bottleneck(StrEnum):
    """What bounds the step."""

    COMPUTE = "compute"
    MEMORY = "memory"
    """Compute that the rate of the device's memory bounds."""
    NETWORK = "network"
    DATA = "data"
    HOST = "host"
    """The host gives work too slowly, or does other work between spans."""
    STRAGGLER = "straggler"
    BUBBLE = "bubble"


ADVICE = {
    Bottleneck.COMPUTE: "Use more devices, a lower precision or compile=blocks; `shoal plan` compares Plans.",
    Bottleneck.MEMORY: "Fuse operations (compile=blocks), use a larger microbatch, or a lower precision.",
    Bottleneck.NETWORK: "`shoal report --collectives` lists what is exposed. `shoal plan` finds a layout "
    "that sends less or overlaps more.",
    Bottleneck.DATA: "Prepare data in more processes, or read it from a faster disk.",
    Bottleneck.HOST: "Give the device more work per launch: compile=blocks, or a larger microbatch.",
    Bottleneck.STRAGGLER: "No rank is late most of the time, so the ranks are late in turn: give them equal "
    "work, and keep other processes from their cores.",
    Bottleneck.BUBBLE: "Use more micro-batches, or a schedule with a smaller bubble: `shoal schedule`.",
}
"""What to do next."""


def bottleneck_of(
    parts: Parts, straggler_seconds: float, memory_share: float | None, policy: Policy
) -> tuple[Bottleneck, float]:
    """Return the bottleneck and its seconds of a step.

    It is the largest part other than compute, if that has its share of the step; else it is compute.

    Args:
        parts: The parts of the mean step.
        straggler_seconds: Seconds that the stragglers cost that were found.
        memory_share: Share of compute that the rate of memory bounds; None if it is not known.
        policy: The thresholds.
    """
    others = {
        Bottleneck.NETWORK: parts.exposed_communication,
        Bottleneck.DATA: parts.data_wait,
        Bottleneck.HOST: (parts.launch or 0.0) + parts.other,
        Bottleneck.STRAGGLER: max(parts.straggler_wait, straggler_seconds),
        Bottleneck.BUBBLE: parts.bubble,
    }
    largest = max(others, key=lambda part: others[part])
    if others[largest] >= policy.bottleneck * parts.wall:
        return largest, others[largest]
    if memory_share is not None and memory_share > 0.5:
        return Bottleneck.MEMORY, parts.compute * memory_share
    return Bottleneck.COMPUTE, parts.compute


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What bounds a window of steps.

    Attributes:
        steps: The judged steps, ascending; empty if the verdict abstains.
        wall: Seconds of the mean step.
        bottleneck: What bounds the step; None if the verdict abstains.
        seconds: Seconds of the mean step that the bottleneck takes.
        share: These as a share of the step.
        evidence: What was measured, as sentences.
        advice: What to do next, as a sentence; "" if the verdict abstains.
        stragglers: Ranks and links for which others wait, the most expensive first.
        missing: What was not measured, and what that leaves open, as sentences.
    """

    steps: tuple[int, ...]
    wall: float
    bottleneck: Bottleneck | None
    seconds: float
    share: float
    evidence: tuple[str, ...]
    advice: str
    stragglers: tuple[Straggler, ...]
    missing: tuple[str, ...]

    def sentences(self) -> tuple[str, ...]:
        """Return the verdict as sentences, the most important first."""
        if self.bottleneck is None:
            return ("No verdict.", *self.missing)
        said = [f"The bottleneck is {self.bottleneck}: {self.share:.0%} of the step.", *self.evidence]
        for each in self.stragglers:
            ranks = " or ".join(map(str, each.ranks))
            said.append(f"Straggler: rank {ranks}, {each.cause}, {each.pattern}. {each.evidence}")
            if each.advice != self.advice:
                said.append(f"Next: {each.advice}")
        return (*said, f"Next: {self.advice}", *(f"Not known: {each}" for each in self.missing))


def verdict(
    timeline: Timeline,
    *,
    first: int | None = None,
    last: int | None = None,
    memory_share: float | None = None,
    predicted: Mapping[str, float] | None = None,
    policy: Policy = POLICY,
) -> Verdict:
    """Return what bounds the steps of a timeline, who is late and why; see `docs/concepts/verdict.md`.

    Args:
        timeline: The measured timeline, with bubbles marked if a pipeline ran.
        first: The first step to judge; by default the first after warm-up, or of the last 200.
        last: The last step to judge; by default the last that all ranks finished.
        memory_share: Share of compute that the rate of the device's memory bounds, if a model tells it.
        predicted: Seconds of each collective by name, if a model tells them: links are held to them.
        policy: The thresholds.
    """
    windows = {rank: found for rank in timeline.ranks if (found := StepWindows(timeline, rank))}
    steps = _judged(windows, first, last, policy)
    if len(steps) < policy.fewest_steps:
        return _abstains(
            f"{len(steps)} step{'s' * (len(steps) != 1)} after warm-up that all ranks finished, and a "
            f"verdict needs {policy.fewest_steps}."
        )
    timeline = _cut(timeline, windows, steps)
    windows = {rank: StepWindows(timeline, rank) for rank in windows}
    works = {rank: own_work(timeline, found, rank) for rank, found in windows.items()}
    chosen = set(steps)
    met = [each for each in meetings(timeline, windows) if each.step in chosen]
    missing = _missing(timeline, works, met, memory_share, predicted, policy)
    is_joined = _is_joined(met, works, policy)
    stragglers: list[Straggler] = []
    if is_joined:
        stragglers = find_stragglers(works, held_up(met, works), steps, policy)
        rings = find_slow_ring_links(met, works, steps, policy, timeline.clock_error, timeline.hosts)
        stragglers += rings or find_slow_links(met, works, steps, policy, predicted)
        stragglers.sort(key=lambda each: -each.seconds)
    breakdown = explain(timeline)
    by_rank = [[rank.steps[step] for step in steps] for rank in breakdown.ranks]
    parts = mean([mean(each) for each in by_rank])
    bottleneck, seconds = bottleneck_of(
        parts, max((each.seconds for each in stragglers), default=0.0), memory_share, policy
    )
    at_fault = bottleneck == Bottleneck.STRAGGLER and bool(stragglers)
    return Verdict(
        steps=tuple(steps),
        wall=parts.wall,
        bottleneck=bottleneck,
        seconds=seconds,
        share=seconds / parts.wall,
        evidence=(_evidence(parts, len(steps), len(works)),),
        advice=stragglers[0].advice if at_fault else ADVICE[bottleneck],
        stragglers=tuple(stragglers),
        missing=tuple(missing),
    )


def _judged(
    windows: Mapping[int, StepWindows], first: int | None, last: int | None, policy: Policy
) -> list[int]:
    """Return the steps that all ranks finished, after warm-up and within the bounds."""
    if not windows:
        return []
    common = sorted(set.intersection(*(set(found) for found in windows.values())))
    common = common[policy.warm_up :]
    chosen = [step for step in common if (first is None or step >= first) and (last is None or step <= last)]
    return chosen[-policy.most_steps :] if first is None else chosen


def _cut(timeline: Timeline, windows: Mapping[int, StepWindows], steps: Sequence[int]) -> Timeline:
    """Return the spans of these steps, and of those between them."""
    start = min(found[step][0] for found in windows.values() for step in (steps[0], steps[-1]))
    stop = max(found[step][1] for found in windows.values() for step in (steps[0], steps[-1]))
    before = min(found.get(steps[0] - 1, (start, start))[0] for found in windows.values())
    return timeline.window(min(start, before), stop)


def _is_joined(met: Sequence[Meeting], works: Mapping[int, OwnWork], policy: Policy) -> bool:
    """Return whether enough collectives join the ranks to say who is late."""
    between = [each for each in met if len(each.group) > 1]
    whole = sum(each.is_whole for each in between)
    return len(works) > 1 and bool(between) and whole >= policy.whole * len(between)


def _missing(
    timeline: Timeline,
    works: Mapping[int, OwnWork],
    met: Sequence[Meeting],
    memory_share: float | None,
    predicted: Mapping[str, float] | None,
    policy: Policy,
) -> list[str]:
    missing = []
    if memory_share is None:
        missing.append("whether arithmetic or the rate of memory bounds compute: no model of the device.")
    if len(works) == 1:
        missing.append("which rank is late: only one rank is in the timeline.")
        return missing
    between = [each for each in met if len(each.group) > 1]
    if not between:
        missing.append("which rank is late: no collective joins the ranks in these steps.")
        return missing
    if not _is_joined(met, works, policy):
        share = sum(each.is_whole for each in between) / len(between)
        absent = sorted({rank for each in between for rank in each.group} - set(works))
        named = f" (no steps of ranks {', '.join(map(str, absent))})" if absent else ""
        missing.append(
            f"which rank is late: only {share:.0%} of the collectives have all of their ranks{named}."
        )
    alone = [rank for rank in works if not peers_of(works, rank)]
    if alone:
        missing.append(
            f"whether ranks {', '.join(map(str, alone))} are slow or have more work: no other rank does the "
            "same work."
        )
    if timeline.clock_error is None:
        missing.append(
            "arrivals between hosts, exactly: their clocks were not compared, so they are as exact as the "
            "wall clocks."
        )
    is_alone = not predicted and len({each.group for each in between}) == 1
    if is_alone and (
        timeline.clock_error is None or not any(ring_of(each, timeline.hosts) for each in between)
    ):
        missing.append(
            "whether a link is slow: there is one group only, no predicted time to compare, and no ring of "
            "three ranks or hosts whose ends could tell."
        )
    if not any(span.kind == Kind.DATA_WAIT for span in timeline):
        missing.append("how long ranks wait for data: the timeline has no such spans.")
    return missing


def _evidence(parts: Parts, steps: int, ranks: int) -> str:
    shares = ", ".join(
        f"{name.replace('_', ' ')} {seconds / parts.wall:.1%}"
        for name, seconds in sorted(parts.disjoint().items(), key=lambda each: -each[1])
        if seconds >= 0.005 * parts.wall
    )
    on = "1 rank" if ranks == 1 else f"{ranks} ranks"
    return f"A step takes {parts.wall * 1e3:.4g} ms in {steps} steps of {on}: {shares}."


def _abstains(missing: str) -> Verdict:
    return Verdict(
        steps=(),
        wall=0.0,
        bottleneck=None,
        seconds=0.0,
        share=0.0,
        evidence=(),
        advice="",
        stragglers=(),
        missing=(missing,),
    )
