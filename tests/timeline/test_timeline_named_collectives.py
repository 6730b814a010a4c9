"""The figures of each collective, against a reference that asks of each moment what it was."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ShoalError
from shoal.spec.timeline import Kind, Lane, Span, Timeline, explain, named_collectives

HORIZON = 30
NAMES = ("all_reduce:bucket 0", "all_reduce:bucket 1", "all_gather:bucket 0")


def span(rank: int, kind: Kind, name: str, start: int, stop: int) -> Span:
    if kind == Kind.COLLECTIVE:
        return Span(rank, Lane.COMMUNICATION, kind, name, start, stop - start, 8, (0, 1), "ring", "data")
    return Span(rank, Lane.COMPUTE, kind, name, start, stop - start)


@st.composite
def steps(draw: st.DrawFn) -> list[Span]:
    """A step of two ranks: collectives in one order, at any times, beside compute without overlap."""
    spans = [span(rank, Kind.STEP, "0", 0, HORIZON) for rank in (0, 1)]
    for rank in (0, 1):
        starts = sorted(draw(st.sets(st.integers(0, HORIZON - 1), min_size=3, max_size=3)))
        for name, start in zip(NAMES, starts, strict=True):
            spans.append(span(rank, Kind.COLLECTIVE, name, start, draw(st.integers(start, HORIZON))))
        edges = sorted(draw(st.sets(st.integers(0, HORIZON), min_size=4, max_size=4)))
        kinds = draw(st.permutations([Kind.FORWARD, Kind.DATA_WAIT, Kind.OPTIMIZER]))
        for kind, start, stop in zip(kinds, edges, edges[1:], strict=False):
            spans.append(span(rank, kind, "", start, stop))
        wait = draw(st.integers(0, HORIZON - 2))
        spans.append(span(rank, Kind.WAIT, NAMES[0], wait, wait + 2))
    return spans


def moments(spans: list[Span], name: str) -> tuple[float, float]:
    """How long a collective is under way on the mean rank, and how long that is exposed."""
    under_way = exposed = 0
    for rank in (0, 1):
        here = [each for each in spans if each.rank == rank]
        communications = [each for each in here if each.kind == Kind.COLLECTIVE]
        own = next(each for each in communications if each.name == name)
        there = max(each.start for each in spans if each.kind == Kind.COLLECTIVE and each.name == name)
        earlier = [each for each in communications if each.start < own.start]
        for moment in range(HORIZON):
            if not max(own.start, there) <= moment < own.stop or any(each.stop > moment for each in earlier):
                continue
            kinds = {each.kind for each in here if each.start <= moment < each.stop}
            computes = bool(kinds & {Kind.FORWARD, Kind.OPTIMIZER}) and Kind.WAIT not in kinds
            under_way += 1
            exposed += not computes and Kind.DATA_WAIT not in kinds
    return under_way / 2, exposed / 2


@given(steps())
def test_seconds_and_exposed_seconds_are_those_of_each_moment(spans: list[Span]) -> None:
    found = {each.name: each for each in named_collectives(Timeline(spans))}
    assert set(found) == set(NAMES)
    for name, each in found.items():
        assert (each.seconds, each.exposed_seconds) == pytest.approx(moments(spans, name))
        assert (each.count, each.bytes, each.ranks, each.algorithms) == (1, 8, 2, ("ring",))
    parts = explain(Timeline(spans)).parts
    unhidden = parts.exposed_communication + parts.straggler_wait
    assert sum(each.exposed_seconds for each in found.values()) <= unhidden + 1e-9


def test_numbers_are_of_a_step_and_without_steps_there_are_none() -> None:
    spans = []
    for index in range(8):
        begin = 10 * index
        spans += [
            Span(0, Lane.COMPUTE, Kind.STEP, str(index), begin, 10),
            Span(0, Lane.COMMUNICATION, Kind.COLLECTIVE, "all_gather:a", begin, 2, 4, (0, 1)),
            Span(0, Lane.COMMUNICATION, Kind.COLLECTIVE, "all_gather:a", begin + 1, 3, 4, (0, 1)),
        ]
    (found,) = named_collectives(Timeline(spans))
    assert (found.count, found.bytes, found.seconds, found.algorithms) == (2, 8, 4, ())
    with pytest.raises(ShoalError, match="no finished step"):
        named_collectives(Timeline([]))
