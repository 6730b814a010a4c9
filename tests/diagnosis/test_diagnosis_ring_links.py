"""A slow link within one group: found from the ends of a ring that is played part by part."""

import random

import pytest

from shoal.analyze.diagnosis import Cause, verdict
from shoal.spec.timeline import Kind, Lane, Purpose, Span, Timeline

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


def timeline(
    ranks,
    slow=(),
    factor=2.0,
    noise=0.03,
    seed=0,
    operation="all_reduce",
    algorithm="ring",
    on_host=1,
    within=0.0002,
    clock_error=0.0,
):
    """Steps of 20 ms of compute and a ring; links from the ranks of `slow` take `factor` times as long.

    With several ranks on each host the algorithm "hierarchical" has a ring of hosts, from which links are
    slow; else the links within a host take the seconds of `within`.
    """
    randomness = random.Random(seed)
    hosts = ranks // on_host
    is_ring = algorithm == "ring"

    def link(place):
        is_within = is_ring and place % on_host != on_host - 1
        seconds = within if is_within else 0.004 * (factor if place in slow else 1.0)
        return lambda: seconds * randomness.lognormvariate(0, noise)

    def ends():
        places = ranks if is_ring else hosts
        rounds = (2 if operation == "all_reduce" else 1) * (places - 1)
        found = ends_of_ring([link(place) for place in range(places)], rounds)
        if is_ring:
            return found
        return [found[rank // on_host] + 0.0005 * randomness.random() for rank in range(ranks)]

    spans, now = [], 0.0
    for step in range(STEPS):
        starts = [now + 0.02 * randomness.lognormvariate(0, noise) for _ in range(ranks)]
        stops = [max(starts) + each for each in ends()]
        stop = max(stops) + 0.0001
        for rank, (start, end) in enumerate(zip(starts, stops, strict=True)):
            name, rest = f"{operation}:bucket 0", (4 << 20, tuple(range(ranks)), algorithm, Purpose.DATA)
            spans += [
                Span(rank, Lane.COMPUTE, Kind.STEP, str(step), now, stop - now),
                Span(rank, Lane.COMPUTE, Kind.FORWARD, "", now, start - now),
                Span(rank, Lane.COMMUNICATION, Kind.COLLECTIVE, name, start, end - start, *rest),
                Span(rank, Lane.COMPUTE, Kind.WAIT, name, start, end - start, purpose=Purpose.DATA),
            ]
        now = stop
    on = {rank: f"host {rank // on_host}" for rank in range(ranks)} if on_host > 1 else None
    return Timeline(spans, hosts=on, clock_error=clock_error)


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


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather"])
@pytest.mark.parametrize(("hosts", "on_host"), [(3, 2), (4, 2), (4, 4)])
def test_a_ring_of_hosts_tells_the_link_between_two_hosts_and_the_cable_of_one(hosts, on_host, operation):
    def ranks_of(*places):
        return tuple(rank for place in places for rank in range(place * on_host, (place + 1) * on_host))

    for place in range(hosts):
        given = {"operation": operation, "algorithm": "hierarchical", "on_host": on_host, "seed": place}
        found = verdict(timeline(hosts * on_host, [place], **given)).stragglers
        named = ranks_of(place, (place + 1) % hosts)
        assert [(each.cause, each.ranks) for each in found] == [(Cause.LINK, named)]
        assert "2 times" in found[0].evidence or "1.9 times" in found[0].evidence
        if hosts > 3:
            both = [place, (place - 1) % hosts]
            found = verdict(timeline(hosts * on_host, both, **given)).stragglers
            assert [(each.cause, each.ranks) for each in found] == [(Cause.LINK, ranks_of(place))]


@pytest.mark.parametrize("within", [0.0, 0.0002, 0.002])
@pytest.mark.parametrize(("hosts", "on_host"), [(3, 2), (4, 2), (4, 3)])
def test_a_ring_of_ranks_that_share_hosts_tells_a_link_between_hosts(hosts, on_host, within):
    given = {"on_host": on_host, "within": within}
    assert not verdict(timeline(hosts * on_host, **given)).stragglers
    assert not verdict(timeline(hosts * on_host, [on_host - 1], factor=1.15, **given)).stragglers
    for place in range(hosts):
        last = place * on_host + on_host - 1
        (found,) = verdict(timeline(hosts * on_host, [last], factor=3.0, seed=place, **given)).stragglers
        assert {last, (last + 1) % (hosts * on_host)} <= set(found.ranks)
        assert len(found.ranks) == 2 * on_host


def test_two_hosts_uneven_hosts_and_clocks_that_were_not_compared_tell_nothing():
    assert not verdict(timeline(4, [1], on_host=2)).stragglers
    assert not verdict(timeline(4, [1], on_host=4)).stragglers
    assert not verdict(timeline(4, [1], algorithm="hierarchical", on_host=2)).stragglers
    assert not verdict(timeline(7, [3], on_host=2)).stragglers
    assert not verdict(timeline(4, [1], algorithm="hierarchical")).stragglers  # its hosts are not known
    unknown = verdict(timeline(4, [1], clock_error=None))
    assert not unknown.stragglers
    assert any("no ring" in each for each in unknown.missing)
