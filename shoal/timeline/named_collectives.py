"""The figures of each collective of a step by its whole name, such as the all-reduce of one bucket."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal.timeline.breakdown import explain
from shoal.timeline.parts import CollectiveFigures
from shoal.timeline.span import Kind
from shoal.timeline.timeline import Timeline

__all__ = ["NamedCollective", "named_collectives"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCollective:
    """One collective of a step; it may happen several times in one.

    Attributes:
        name: Its operation and what it moves, such as "all_reduce bucket3".
        purpose: One of `Purpose`.
        algorithms: Its algorithms, ascending; empty if the backend does not report them.
        ranks: Number of ranks that take part.
        figures: Figures of a step, as the mean over ranks.
    """

    name: str
    purpose: str
    algorithms: tuple[str, ...]
    ranks: int
    figures: CollectiveFigures


def named_collectives(timeline: Timeline) -> list[NamedCollective]:
    """Return the collectives of a step, in the order in which they first start.

    Raises:
        ShoalError: No rank finished a step.
    """
    # `explain` groups operations by the part of their name before a colon.
    spans = [
        replace(span, name=span.name.replace(":", " ", 1))
        if span.kind in (Kind.COLLECTIVE, Kind.WAIT)
        else span
        for span in timeline
    ]
    figures = explain(Timeline(spans)).collectives
    collectives = [span for span in spans if span.kind == Kind.COLLECTIVE and span.name in figures]
    algorithms: dict[str, set[str]] = {}
    for span in collectives:
        algorithms.setdefault(span.name, set()).update({span.algorithm} - {""})
    last = {span.name: span for span in collectives}
    return [
        NamedCollective(
            name=name,
            purpose=last[name].purpose,
            algorithms=tuple(sorted(found)),
            ranks=len(last[name].group),
            figures=figures[name],
        )
        for name, found in algorithms.items()
        if figures[name].count
    ]
