"""Launch: the time in which a device idles because the host has not given it the next work yet.

Between the spans of a step it is a gap: until the host gives the device the start of the next span, the
device has nothing to do.

Within a span, which may be a thousand kernels, no gap shows. There it is the span's time less the *own* time
of the same work: what the work takes if all of it is given before the device comes to it, as in the held
steps that the recorder makes. It is never more than the time until the host had given the whole span: work
that is slower for another reason does not count while the host is ahead. In a held step the host may be
unable to get far enough ahead: CUDA takes about 1,024 launches, and some work asks the device for a value.
Then own time is too long and launch too short.

Work of a step is matched by kind, name and order. Waits for collectives are in neither time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from types import MappingProxyType

from shoal.timeline.intervals import Interval, Intervals, intersect, length, subtract, union
from shoal.timeline.span import Kind, Lane, Span

WORK = (Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER)
"""The kinds of spans that compute."""

Work = tuple[str, str, int]
"""A span's kind, its name, and how many of these the step had before."""

NO_OWN_SECONDS: Mapping[Work, float] = MappingProxyType({})


def own_seconds(spans: Sequence[Span]) -> dict[Work, float]:
    """Return the own seconds of a rank's work: medians over its held steps."""
    found: dict[Work, list[float]] = {}
    for held in (span for span in spans if span.kind == Kind.HELD_STEP):
        inside = [span for span in spans if span.stop > held.start and span.start < held.stop]
        for work, _, busy in _works((held.start, held.stop), inside, stopped_in(inside)):
            found.setdefault(work, []).append(length(busy))
    return {work: median(seconds) for work, seconds in found.items()}


def launch_in_work(
    window: Interval, spans: Iterable[Span], stopped: Intervals, own: Mapping[Work, float]
) -> float:
    """Return the seconds of launch within the work of a step.

    Args:
        window: The start and the end of the step.
        spans: The spans of one rank that lie in the step, wholly or in part.
        stopped: The times in which its compute is blocked, or waits for files.
        own: The result of `own_seconds`.
    """
    total = 0.0
    for work, span, busy in _works(window, spans, stopped):
        if work in own and span.host is not None:
            until_given = length(intersect(busy, [(span.start, span.host[1])]))
            total += min(max(length(busy) - own[work], 0.0), until_given)
    return total


def launch_in_gaps(gaps: Intervals, spans: Iterable[Span]) -> Intervals:
    """Return the times of launch between the spans of a step.

    Args:
        gaps: The times of the step that no span explains.
        spans: The spans of one rank in the step, with that of the step.
    """
    bounds = sorted(
        bound
        for span in spans
        if span.lane == Lane.COMPUTE and span.host is not None
        for bound in ((span.start, span.host[0]), (span.stop, span.host[1]))
    )
    launch = []
    for start, stop in gaps:
        after = bisect_left(bounds, (stop,))
        if after < len(bounds):
            launch.append((start, min(stop, bounds[after][1])))
    return union(launch)


def blocked_in(spans: Sequence[Span]) -> Intervals:
    """Return the times in which the compute lane is blocked on collectives.

    On a device a wait lasts no longer than the collectives: in what is left of its span, the device idles
    until the host has given it the end of the wait.
    """
    waits = [
        span for span in spans if span.lane == Lane.COMPUTE and span.kind in (Kind.WAIT, Kind.COLLECTIVE)
    ]
    blocked = union((span.start, span.stop) for span in waits)
    if all(span.host is None for span in waits):
        return blocked
    return intersect(
        blocked, union((span.start, span.stop) for span in spans if span.lane == Lane.COMMUNICATION)
    )


def stopped_in(spans: Sequence[Span]) -> Intervals:
    """Return the times in which the compute lane is blocked on collectives, or waits for files."""
    files = (
        (span.start, span.stop) for span in spans if span.lane == Lane.COMPUTE and span.kind == Kind.FILE_WAIT
    )
    return union([*blocked_in(spans), *files])


def _works(
    window: Interval, spans: Iterable[Span], stopped: Intervals
) -> Iterator[tuple[Work, Span, Intervals]]:
    """Yield each span that computes in a step, by start, with the times in which it is not stopped."""
    seen: Counter[tuple[str, str]] = Counter()
    for span in spans:
        # Work of the next step may start where this one ends, to within rounding: its middle tells.
        is_inside = window[0] <= (span.start + span.stop) / 2 < window[1]
        if is_inside and span.kind in WORK and span.lane == Lane.COMPUTE:
            what = span.kind, span.name
            yield (*what, seen[what]), span, subtract([(span.start, span.stop)], stopped)
            seen[what] += 1
