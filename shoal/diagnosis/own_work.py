"""The own work of each rank in each step: what it does while nobody makes it wait.

The wall time of a phase cannot find a slow rank: a rank that waits in backward for a slow one has a backward
just as long. Own work leaves out all waits for communication, so it differs between ranks.

    loader     data waits, without those for the copy
    copy       data waits for the copy to the device, and copies on the compute lane
    forward, backward, optimizer
               their spans, without waits
    launch     a device idles because its host has not given it the next work yet; not in the other phases
    outside    time of the step that no span explains, and the time since the step before

A rank is idle while it communicates, or waits to, and does not work. The bubble of a schedule is not idle
time.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shoal.diagnosis.cause import Cause
from shoal.errors import PlanError
from shoal.plan.schedules import Action
from shoal.timeline import Kind, Lane, Span, Timeline
from shoal.timeline.intervals import Interval, Intervals, intersect, length, subtract, union
from shoal.timeline.launch import WORK, Work, blocked_in, launch_in_gaps, launch_in_work, own_seconds
from shoal.timeline.windows import StepWindows

_NAMED = (Kind.WAIT, Kind.COLLECTIVE, Kind.VALIDATION, Kind.CHECKPOINT)
_COPIED = "inputs"
"""The name of a data wait for a copy."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one rank did in one step.

    Attributes:
        seconds: Seconds of each phase.
        idle: The times in which it waits for communication.
        waits: The waits of the compute lane, by the name of what they wait for.
        wall: Seconds of the step.
    """

    seconds: Mapping[Cause, float]
    idle: Intervals
    waits: Mapping[str, Intervals]
    wall: float

    @property
    def total(self) -> float:
        """Return the seconds of all phases."""
        return sum(self.seconds.values())


@dataclass(frozen=True, slots=True)
class OwnWork:
    """What one rank did.

    Attributes:
        rank: The global rank.
        steps: Its steps, by index.
        content: Kinds and names of the spans of a step that compute: ranks with the same content do the same
            work.
        stages: Pipeline stages of the rank, from the names of its spans.
    """

    rank: int
    steps: Mapping[int, StepWork]
    content: frozenset[tuple[tuple[str, str], int]]
    stages: tuple[int, ...]


def own_work(timeline: Timeline, windows: StepWindows, rank: int) -> OwnWork:
    """Return the own work of a rank.

    Args:
        timeline: Timeline of all ranks.
        windows: The steps of this rank.
        rank: The rank.
    """
    spans = timeline.of(rank)
    between, own = _between(windows, spans), own_seconds(spans)
    shared = windows.share_out((span, span) for span in spans)
    steps = {
        index: _step(windows[index], of_step, between.get(index, 0.0), own)
        for index, of_step in shared.items()
    }
    content = _content(shared)
    return OwnWork(rank, steps, content, _stages(name for (_, name), _ in content))


def _step(window: Interval, spans: Sequence[Span], before: float, own: Mapping[Work, float]) -> StepWork:
    whole = [window]

    def moments(kinds: Collection[str], *, copies: bool | None = None) -> Intervals:
        chosen = (
            (span.start, span.stop)
            for span in spans
            if span.kind in kinds
            and span.lane == Lane.COMPUTE
            and (copies is None or copies == (span.name == _COPIED or span.kind == Kind.COPY))
        )
        return intersect(whole, union(chosen))

    blocked = intersect(whole, blocked_in(spans))
    phases: dict[Cause, Intervals] = {}
    taken: Intervals = blocked
    for cause, found in (
        (Cause.FORWARD, moments((Kind.FORWARD,))),
        (Cause.BACKWARD, moments((Kind.BACKWARD,))),
        (Cause.OPTIMIZER, moments((Kind.OPTIMIZER,))),
        (Cause.LOADER, moments((Kind.DATA_WAIT,), copies=False)),
        (Cause.COPY, moments((Kind.DATA_WAIT, Kind.COPY), copies=True)),
    ):
        phases[cause] = subtract(found, taken)
        taken = union([*taken, *found])
    occupied = union(each for found in phases.values() for each in found)
    bubble = subtract(moments((Kind.BUBBLE,)), occupied)
    on_lane = ((span.start, span.stop) for span in spans if span.lane == Lane.COMMUNICATION)
    communication = union([*blocked, *intersect(whole, union(on_lane))])
    unexplained = subtract(whole, union([*occupied, *communication, *bubble]))
    seconds = {cause: length(found) for cause, found in phases.items()}
    seconds[Cause.LAUNCH] = 0.0
    if any(span.host is not None for span in spans):
        gaps = launch_in_gaps(unexplained, spans)
        unexplained = subtract(unexplained, gaps)
        seconds[Cause.LAUNCH] = length(gaps)
        for kind in WORK:
            within = launch_in_work(window, [span for span in spans if span.kind == kind], blocked, own)
            seconds[Cause(kind)] -= within
            seconds[Cause.LAUNCH] += within
    seconds[Cause.OUTSIDE] = length(unexplained) + before
    waits: dict[str, Intervals] = {}
    for span in spans:
        if span.lane == Lane.COMPUTE and span.kind in (Kind.WAIT, Kind.COLLECTIVE):
            waits.setdefault(span.name, []).append((span.start, span.stop))
    return StepWork(
        seconds=seconds,
        idle=subtract(communication, union([*occupied, *bubble])),
        waits={name: union(found) for name, found in waits.items()},
        wall=window[1] - window[0],
    )


def _between(windows: StepWindows, spans: Sequence[Span]) -> dict[int, float]:
    """Return the seconds between each step and the one before, without what has spans of its own."""
    gaps = {
        index: (windows[index - 1][1], start)
        for index, (start, _) in windows.items()
        if index - 1 in windows and windows[index - 1][1] < start
    }
    held = union((span.start, span.stop) for span in spans if span.kind in _NAMED)
    return {index: length(subtract([gap], held)) for index, gap in gaps.items()}


def _content(shared: Mapping[int, Sequence[Span]]) -> frozenset[tuple[tuple[str, str], int]]:
    """Return what a step of the rank consists of: that of its middle step."""
    if not shared:
        return frozenset()
    middle = sorted(shared)[len(shared) // 2]
    counted = Counter((span.kind, span.name) for span in shared[middle] if span.kind in WORK)
    return frozenset(counted.items())


def _stages(names: Iterable[str]) -> tuple[int, ...]:
    found = set()
    for name in names:
        with contextlib.suppress(PlanError):
            found.add(Action.parse(name).stage)
    return tuple(sorted(found))
