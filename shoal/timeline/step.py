"""The parts of the time of one rank's step: disjoint parts that sum to its wall time.

With sets of times:

    blocked   = wait spans and collectives on the compute lane
    file wait = file-wait spans, without blocked
    compute   = forward, backward and optimizer spans on the compute lane, without blocked and file wait
    data wait = data-wait spans, without compute and file wait
    communication = everything on the communication lane, and blocked
    exposed communication = communication, without compute, data wait and file wait: nothing overlaps it
    bubble    = bubble spans, without compute, data wait and file wait; taken out of exposed communication,
                since a pipeline's idle time shows as the wait for a message
    straggler wait = the part of exposed communication before the last member of the group had started the
                     collective that is waited for; taken out of exposed communication
    other     = the rest of the step
    launch    = idle time of a device, taken out of compute and other: see `shoal.timeline.launch`

Each part is computed from the spans, none as a remainder of numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from shoal.timeline.intervals import Interval, Intervals, intersect, length, subtract, union
from shoal.timeline.launch import (
    NO_OWN_SECONDS,
    WORK,
    Work,
    blocked_in,
    launch_in_gaps,
    launch_in_work,
)
from shoal.timeline.matching import Arrival, moments_of_lateness
from shoal.timeline.parts import CollectiveFigures, Parts
from shoal.timeline.span import Kind, Lane, Span


def explain_step(
    window: Interval,
    spans: Sequence[Span],
    arrivals: Sequence[Arrival],
    own: Mapping[Work, float] = NO_OWN_SECONDS,
) -> tuple[Parts, dict[str, CollectiveFigures]]:
    """Return the parts of the time of one rank's step, and the figures of each operation.

    Args:
        window: The start and the end of the step.
        spans: The rank's spans that lie in the step, wholly or in part.
        arrivals: The rank's collectives that lie in the step.
        own: Seconds of a device's own work: the result of `own_seconds`.
    """
    whole = [window]

    def moments(kinds: Collection[str], lane: str) -> Intervals:
        chosen = ((span.start, span.stop) for span in spans if span.kind in kinds and span.lane == lane)
        return intersect(whole, union(chosen))

    blocked = intersect(whole, blocked_in(spans))
    file_wait = subtract(moments((Kind.FILE_WAIT,), Lane.COMPUTE), blocked)
    stopped = union(blocked + file_wait)
    compute = subtract(moments(WORK, Lane.COMPUTE), stopped)
    data_wait = subtract(moments((Kind.DATA_WAIT,), Lane.COMPUTE), union(compute + file_wait))
    occupied = union(compute + data_wait + file_wait)
    communication = union(blocked + moments(tuple(Kind), Lane.COMMUNICATION))
    bubble = subtract(moments((Kind.BUBBLE,), Lane.COMPUTE), occupied)
    unhidden = subtract(communication, union(occupied + bubble))
    late = moments_of_lateness(spans, arrivals)
    exposed = subtract(unhidden, late)
    unexplained = subtract(whole, union(occupied + communication + bubble))

    launch = None
    in_work = 0.0
    in_gaps: Intervals = []
    if any(span.host is not None for span in spans):
        in_gaps = launch_in_gaps(unexplained, spans)
        in_work = launch_in_work(window, spans, stopped, own)
        launch = in_work + length(in_gaps)

    started = [arrival for arrival in arrivals if window[0] <= arrival.span.start < window[1]]
    parts = Parts(
        compute=length(compute) - in_work,
        launch=launch,
        exposed_communication=length(exposed),
        bubble=length(bubble),
        data_wait=length(data_wait),
        file_wait=length(file_wait) if file_wait else None,
        straggler_wait=length(intersect(unhidden, late)),
        other=length(subtract(unexplained, in_gaps)),
        wall=length(whole),
        communication=length(communication),
        overlapped_communication=length(intersect(communication, occupied)),
        bytes=sum(arrival.span.bytes for arrival in started),
    )
    return parts, _by_operation(started, spans, exposed)


def _by_operation(
    started: Sequence[Arrival], spans: Sequence[Span], exposed: Intervals
) -> dict[str, CollectiveFigures]:
    grouped: dict[str, list[Arrival]] = {}
    for arrival in started:
        grouped.setdefault(_operation(arrival.span), []).append(arrival)
    covered: dict[str, list[Interval]] = {}
    for span in spans:
        if span.kind in (Kind.COLLECTIVE, Kind.WAIT):
            covered.setdefault(_operation(span), []).append((span.start, span.stop))
    return {
        operation: CollectiveFigures(
            count=len(members),
            bytes=sum(arrival.span.bytes for arrival in members),
            seconds=sum(arrival.span.duration for arrival in members),
            exposed_seconds=length(intersect(exposed, union(covered[operation]))),
            transfer_seconds=sum(arrival.span.stop - arrival.complete for arrival in members),
        )
        for operation, members in grouped.items()
    }


def _operation(span: Span) -> str:
    return span.name.partition(":")[0]
