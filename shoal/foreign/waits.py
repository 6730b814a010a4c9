"""Waits that other programs do not record: compute stands still until a collective has ended.

Between two spans that compute, a rank waits for each collective that ends there, from when the rank is free
and has started it until it ends. It also waits for a collective that lies within the optimizer's span, such
as that of the gradient's norm.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from shoal.timeline import Kind, Lane, Span
from shoal.timeline.intervals import subtract, union


def with_waits(spans: Sequence[Span]) -> list[Span]:
    """Return the spans of one rank with waits on its compute lane."""
    collectives = sorted((span for span in spans if span.kind == Kind.COLLECTIVE), key=lambda span: span.stop)
    optimizers = sorted((each for each in spans if each.kind == Kind.OPTIMIZER), key=lambda each: each.start)
    starts = [span.start for span in optimizers]
    within = [each for each in collectives if _is_within(each, optimizers, starts)]
    working = subtract(
        union(
            (span.start, span.stop) for span in spans if span.lane == Lane.COMPUTE and span.kind != Kind.STEP
        ),
        union((each.start, each.stop) for each in within),
    )
    if not collectives or not working:
        return list(spans)
    whole = (
        min(working[0][0], min(span.start for span in collectives)),
        max(working[-1][1], collectives[-1].stop),
    )
    waits: list[Span] = []
    position = 0
    for start, stop in subtract([whole], working):
        while position < len(collectives) and collectives[position].stop <= start:
            position += 1
        free = start
        while position < len(collectives) and collectives[position].stop <= stop:
            each = collectives[position]
            begin = max(free, each.start)
            if each.stop > begin:
                seconds, purpose = each.stop - begin, each.purpose
                waits.append(
                    Span(each.rank, Lane.COMPUTE, Kind.WAIT, each.name, begin, seconds, purpose=purpose)
                )
                free = each.stop
            position += 1
    return [*spans, *waits]


def _is_within(collective: Span, optimizers: Sequence[Span], starts: Sequence[float]) -> bool:
    """Return whether a collective lies within one of these spans, which follow one another."""
    position = bisect_right(starts, collective.start) - 1
    return position >= 0 and collective.stop <= optimizers[position].stop
