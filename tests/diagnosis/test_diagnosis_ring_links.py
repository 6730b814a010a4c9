"""A slow link within one group: found from the ends of a ring that is played part by part."""

import random

import pytest

from shoal.diagnosis import Cause, verdict
from shoal.timeline import Kind, Lane, Purpose, Span, Timeline

STEPS = 42


def ends_of_ring(sends, parts):
    """When each rank ends, if `sends[i]` draws the seconds of a part over the link from i to i + 1.

    A rank sends what it received in the round before, once that has arrived and its last part has left.
    """
    ranks = len(sends)
    arrived, left = [0.0] * ranks, [0.0] * ranks
    for _ in range(parts):
        left = [max(arrived[rank], left[rank]) + sends[rank]() for rank in range(ranks)]
        arrived = [left[rank - 1] for rank in range(ranks)]
    return arrived


def timeline(ranks, slow=(), factor=2.0, noise=0.03, seed=0, operation="all_reduce", algorithm="ring"):
    """Steps of 20 ms of compute and a ring; links from the ranks of `slow` take `factor` times as long."""
    randomness = random.Random(seed)

    def link(rank):
        seconds = 0.004 * (factor if rank in slow else 1.0)
        return lambda: seconds * randomness.lognormvariate(0, noise)

    parts = (2 if operation == "all_reduce" else 1) * (ranks - 1)
    spans, now = [], 0.0
    for step in range(STEPS):
        starts = [now + 0.02 * randomness.lognormvariate(0, noise) for _ in range(ranks)]
        ends = [max(starts) + each for each in ends_of_ring([link(rank) for rank in range(ranks)], parts)]
        stop = max(ends) + 0.0001
        for rank, (start, end) in enumerate(zip(starts, ends, strict=True)):
            name, rest = f"{operation}:bucket 0", (4 << 20, tuple(range(ranks)), algorithm, Purpose.DATA)
            spans += [
                Span(rank, Lane.COMPUTE, Kind.STEP, str(step), now, stop - now),
                Span(rank, Lane.COMPUTE, Kind.FORWARD, "", now, start - now),
                Span(rank, Lane.COMMUNICATION, Kind.COLLECTIVE, name, start, end - start, *rest),
                Span(rank, Lane.COMPUTE, Kind.WAIT, name, start, end - start, purpose=Purpose.DATA),
            ]
        now = stop
    return Timeline(spans)


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("ranks", [3, 4, 5, 8])
def test_the_slow_link_of_a_ring_is_named_with_both_ends(ranks, operation):
    for rank in range(ranks):
        found = verdict(timeline(ranks, [rank], seed=rank, operation=operation)).stragglers
        assert [(each.cause, each.ranks) for each in found] == [(Cause.LINK, (rank, (rank + 1) % ranks))]
        assert "2 times" in found[0].evidence or "1.9 times" in found[0].evidence


@pytest.mark.parametrize("ranks", [4, 5, 8])
def test_a_cable_that_is_slow_both_ways_is_that_of_one_rank(ranks):
    for rank in range(ranks):
        found = verdict(timeline(ranks, [rank, (rank - 1) % ranks], seed=rank)).stragglers
        assert [(each.cause, each.ranks) for each in found] == [(Cause.LINK, (rank,))]


def test_nothing_is_said_of_even_rings_of_other_algorithms_or_of_small_differences():
    assert not verdict(timeline(4)).stragglers
    assert not verdict(timeline(4, [1], factor=1.15)).stragglers
    unknown = verdict(timeline(4, [1], algorithm="double-tree"))
    assert not unknown.stragglers
    assert any("no ring" in each for each in unknown.missing)


def test_noisy_even_rings_give_no_alarm():
    alarms = [verdict(timeline(4, noise=0.3, seed=seed)).stragglers for seed in range(40)]
    assert not [each for found in alarms for each in found if each.cause == Cause.LINK]
