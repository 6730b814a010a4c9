"""Match the spans of different ranks that are one collective, and find when its last member arrived.

A collective appears once on each rank of its group. Ranks run the same program, so its spans are found
by (group, name) and by order: the k-th span of that group and name that starts within a step, on every
rank. A rank that arrives early waits for the last one; no network could make that time shorter.

Several may run at once: a message that was requested long ago, and the collective that a rank waits for now.
A wait belongs to the collectives with its own name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shoal.timeline.intervals import Interval, Intervals, intersect, subtract, union
from shoal.timeline.span import Kind, Lane, Span
from shoal.timeline.timeline import Timeline
from shoal.timeline.windows import StepWindows

__all__ = ["Arrival", "match_collectives", "moments_of_lateness"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A rank's span in a collective, and the time at which the whole group had arrived.

    Attributes:
        span: The collective on this rank.
        step: The index of the step in which it starts.
        complete: Time at which the last member of the group started it, within the span; the start of the
            span if the spans of other members are missing.
    """

    span: Span
    step: int
    complete: float


@dataclass(frozen=True, slots=True)
class _Key:
    """The fields that all spans of one collective share."""

    step: int
    group: tuple[int, ...]
    name: str
    occurrence: int


def match_collectives(timeline: Timeline, windows: Mapping[int, StepWindows]) -> dict[int, list[Arrival]]:
    """Return the collectives that start within steps, for each rank, in order of time.

    Args:
        timeline: Timeline of all ranks.
        windows: The steps of each rank to look at.
    """
    keyed = {rank: _keyed(timeline.of(rank), steps) for rank, steps in windows.items()}
    members: dict[_Key, dict[int, Span]] = {}
    for rank, collectives in keyed.items():
        for key, span in collectives:
            members.setdefault(key, {})[rank] = span
    complete = {
        key: max(span.start for span in spans.values())
        for key, spans in members.items()
        if set(spans) == set(key.group) and _overlap([windows[rank][key.step] for rank in spans])
    }
    return {
        rank: [
            Arrival(span, key.step, min(span.stop, complete.get(key, span.start)))
            for key, span in collectives
        ]
        for rank, collectives in keyed.items()
    }


def moments_of_lateness(spans: Iterable[Span], arrivals: Iterable[Arrival]) -> Intervals:
    """Return the times in which not all members had started what a rank waits for.

    Within a wait, these are collectives with the wait's name. Without a wait, or without a collective of its
    name, all running collectives count.

    Args:
        spans: Spans of one rank.
        arrivals: The collectives of that rank.
    """
    incomplete: dict[str, list[Interval]] = {}
    for arrival in arrivals:
        incomplete.setdefault(arrival.span.name, []).append((arrival.span.start, arrival.complete))
    waits: dict[str, list[Interval]] = {name: [] for name in incomplete}
    for span in spans:
        if span.lane == Lane.COMPUTE and span.kind in (Kind.WAIT, Kind.COLLECTIVE) and span.name in waits:
            waits[span.name].append((span.start, span.stop))
    waited = union(each for moments in waits.values() for each in moments)
    late = subtract(union(each for moments in incomplete.values() for each in moments), waited)
    for name, moments in waits.items():
        late += intersect(union(moments), union(incomplete[name]))
    return union(late)


def _keyed(spans: Iterable[Span], windows: StepWindows) -> list[tuple[_Key, Span]]:
    seen: Counter[tuple[int, tuple[int, ...], str]] = Counter()
    keyed = []
    for span in spans:
        if span.kind != Kind.COLLECTIVE or (step := windows.started_in(span)) is None:
            continue
        occurrence = seen[step, span.group, span.name]
        seen[step, span.group, span.name] += 1
        keyed.append((_Key(step, span.group, span.name, occurrence), span))
    return keyed


def _overlap(windows: list[Interval]) -> bool:
    """Return whether the ranks ran the step together; after a crash, they may have it from different runs."""
    return max(start for start, _ in windows) < min(stop for _, stop in windows)
