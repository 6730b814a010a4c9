"""Shares by the speed of devices that differ: the best numbers, their gain, and when they are taken."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.predict.planner import choose
from shoal.predict.planner.heterogeneous import in_proportion, with_shares
from shoal.predict.planner.refine import LEAST_GAIN, polished
from shoal.predict.planner.search import SLACK, Search
from shoal.spec.cluster import Cluster, Device, Level, Part, every_device
from shoal.spec.workload import ModelShape, workload_of

FAST = Device(name="fast", memory=2e10, bandwidth=1e12, peak={"bf16": 1e14, "fp32": 2e13}, units=64)
WORKLOAD = workload_of(ModelShape(layers=2, hidden=1024, ffn=4096, heads=8, kv_heads=4, vocab=512, seq=1024))


def one_slow_node(pace, *, nodes=4, network=1e11):
    """Nodes of two devices, the last of which is slow."""
    levels = (
        Level(name="links", devices=2, bandwidth=1e11),
        Level(name="network", devices=2 * nodes, bandwidth=network),
    )
    parts = Part(device=FAST, devices=2 * (nodes - 1)), Part(device=FAST, devices=2, pace=pace)
    return Cluster(name="one slow", device=FAST, levels=levels, parts=parts)


@settings(max_examples=100)
@given(st.lists(st.sampled_from((1.0, 1.25, 2.0, 7.0)), min_size=1, max_size=4), st.integers(1, 12))
def test_numbers_in_proportion_have_the_least_longest_time(seconds, total):
    every = [
        numbers
        for numbers in itertools.product(range(1, total + 1), repeat=len(seconds))
        if sum(numbers) == total
    ]
    found = in_proportion(seconds, total)
    assert (found is None) == (not every)
    if found is not None:
        assert sum(found) == total
        assert min(found) >= 1

        def longest(numbers):
            return max(number * each for number, each in zip(numbers, seconds, strict=True))

        assert longest(found) == min(map(longest, every))


def test_on_eight_h100_nodes_one_of_which_is_slow_shares_gain_more_than_half_of_what_is_lost():
    nodes = Cluster.preset("dgx-h100", 64)
    slow = nodes.replace(
        parts=(Part(device=nodes.device, devices=56), Part(device=nodes.device, devices=8, pace=0.8))
    )
    workload = workload_of(ModelShape(layers=8, hidden=2048, ffn=8192, heads=16, vocab=32000, seq=4096))

    def dp_alone(cluster):
        search = Search(workload, cluster, 2048)
        even = polished(search, search.best(1, lambda each: each.dp == 64).found[0])
        return even.seconds, with_shares(search, 1, lambda each: each.dp == 64)

    (whole, none), (even, (shared,)) = dp_alone(nodes), dp_alone(slow)
    assert none == []
    assert shared.plan.shared.total * shared.plan.microbatch == 2048
    assert shared.plan.shared.of_rank(63) < shared.plan.shared.of_rank(0)
    speed = (56 + 8 * 0.8) / 64  # of all devices, as a share of 64 quick ones
    assert even - shared.seconds > 0.5 * (even - whole)
    assert shared.seconds > whole / speed
    assert even > 1.13 * shared.seconds


@settings(max_examples=4, deadline=None)
@given(st.sampled_from((0.5, 0.8, 0.9)), st.sampled_from((24, 96)), st.sampled_from((1e10, 1e11)))
def test_shares_never_make_a_choice_slower_and_slower_devices_make_none_quicker(pace, batch, network):
    made = one_slow_node(pace, network=network)
    search = Search(WORKLOAD, made, batch)
    without = min(polished(search, each).seconds for each in search.best(3).found)
    best = choose(WORKLOAD, made, batch).best
    assert best.seconds * (1 - SLACK) <= without / (1 - LEAST_GAIN)
    quicker = choose(WORKLOAD, one_slow_node((1 + pace) / 2, network=network), batch).best
    assert quicker.seconds * (1 - LEAST_GAIN) * (1 - SLACK) <= best.seconds
    quick = choose(WORKLOAD, every_device(made, FAST), batch).best
    assert quick.seconds * (1 - LEAST_GAIN) * (1 - SLACK) <= best.seconds


def test_the_planner_takes_shares_where_they_are_quickest_and_says_what_is_lost_without():
    choice = choose(WORKLOAD, one_slow_node(0.5), 112)
    best, told = choice.best, choice.explain()
    assert best.plan.shared is not None
    assert best.plan.shared.of_rank(0) == pytest.approx(
        2 * best.plan.shared.of_rank(best.plan.dp - 1), rel=0.3
    )
    even = told.unequal.even
    assert even.plan.shared is None
    assert even.seconds > best.seconds / (1 - LEAST_GAIN)
    text = " ".join(told.sentences())
    assert f"without shares the best Plan is {even.seconds / best.seconds - 1:.1%} slower" in text
    assert "get equal work" not in text
    assert sum(told.compute.values()) <= best.parts["compute"] * (1 + 1e-9)


def test_equal_devices_in_parts_have_no_shares():
    made = one_slow_node(1.0)
    assert with_shares(Search(WORKLOAD, made, 96), 3) == []
    assert dataclasses.replace(made.parts[0], devices=2).at_pace == made.parts[1].at_pace
