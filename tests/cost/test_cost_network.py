"""Seconds of collectives over levels of links, held to formulas, to counting, and to published times."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import (
    A_E,
    A_I,
    EXACT,
    INSIDE,
    NETWORK,
    A,
    B,
    G,
    K,
    S,
    cluster,
    level,
    one_level,
    seconds,
    two_levels,
)

from shoal.predict.cost.collectives.link_use import message_seconds
from shoal.predict.cost.collectives.network import (
    algorithm_seconds,
    collective_load,
    collective_seconds,
)
from shoal.spec.cluster import Cluster
from shoal.spec.plan import Boundary, Group

NEXT = Boundary(0, 1, Group(1))  # a message to the next rank
CHUNKS = 1e-5  # relative: the least over numbers of chunks that are 0.2 % apart, at which it is flat


def in_chunks(steps, last, moved):
    """Seconds of a pipeline of steps that take `steps` and bytes that take `moved`: the least of any chunks.

    Of so many chunks each takes the last step's seconds and its part of the bytes, after the first has come
    through the steps before.
    """
    before = (steps - last) / last
    return min(
        (chunks + before) * (last + moved / chunks) for chunks in (10 ** (k / 1000) for k in range(6000))
    )


@pytest.mark.parametrize("n", [2, 3, 4, 7, 8, 64])
def test_each_algorithm_within_one_level_takes_what_its_formula_says(n):
    rest = (n - 1) / n * S / B
    doublings = math.ceil(math.log2(n))
    plain, mesh = one_level(n), one_level(n, mesh=True)
    switched = one_level(n, reduces=True, reduction_share=0.6)
    expected = [
        (plain, "all_reduce", "ring", 2 * (n - 1) * A + 2 * rest),
        (mesh, "all_reduce", "one-shot", A + (n - 1) * S / B),
        (switched, "all_reduce", "switch", A + (n + 1) / n * S / (0.6 * B)),
        (plain, "all_gather", "ring", (n - 1) * A + rest),
        (plain, "reduce_scatter", "ring", (n - 1) * A + rest),
        (plain, "broadcast", "chain", (n - 1) * A + S / B),
        (plain, "broadcast", "tree", doublings * (A + S / B)),
        (plain, "reduce", "chain", (n - 1) * A + S / B),
        (plain, "all_to_all", "pairwise", (n - 1) * A + rest),
    ]
    if n >= 4:
        expected.append((plain, "all_reduce", "tree", 2 * doublings * A + 2 * S / B))
    for machine, collective, algorithm, formula in expected:
        assert seconds(collective, algorithm, machine) == pytest.approx(formula, rel=EXACT), algorithm


def test_an_algorithm_is_offered_only_where_its_links_are():
    def names(machine, ranks):
        return set(algorithm_seconds("all_reduce", S, Group(ranks), machine))

    node, network = level(8, 400e9, mesh=True), level(32, 50e9)
    assert names(cluster(node, network), 8) == {"ring", "tree", "one-shot"}
    assert names(cluster(node, network), 32) == {"ring", "tree"}
    assert names(cluster(level(8, 400e9, reduces=True), network), 32) == {"ring", "tree", "switch"}


def test_two_ranks_exchange_their_buffers_once_by_ring_and_by_tree():
    assert seconds("all_reduce", "ring", one_level(2)) == pytest.approx(2 * A + S / B, rel=EXACT)
    assert seconds("all_reduce", "tree", one_level(2)) == pytest.approx(2 * A + S / B, rel=EXACT)


def edges_of_trees(count):
    """By node, its edges in two binary trees over `count` nodes; inner nodes of one are leaves of the other.

    The first is numbered in order below its root 0, so that odd numbers are leaves; the second is the same
    with the numbers in reverse, or moved by one where that would not make odd ones of even ones.
    """
    edges = [0] * count
    for node in range(1, count):
        lowest = node & -node
        parent = node - lowest + 2 * lowest if node & 2 * lowest == 0 else node - lowest
        while parent >= count:
            lowest *= 2
            parent = node - (node & (2 * lowest - 1))
        edges[node] += 1
        edges[parent] += 1
    other = edges[::-1] if count % 2 == 0 else edges[-1:] + edges[:-1]
    return [one + two for one, two in zip(edges, other, strict=True)]


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 13, 16, 31, 64])
def test_the_busiest_rank_of_double_trees_sends_what_counting_its_edges_gives(count):
    free = level(count, B, latency=0.0)
    busiest = max(edges_of_trees(count)) * S / 2  # half of the buffer up or down each edge
    assert seconds("all_reduce", "tree", cluster(free)) == pytest.approx(busiest / B, rel=EXACT)


def joining(machine, first, second):
    """The innermost level that has both ranks in one group."""
    return next(each for each in machine.levels if first // each.devices == second // each.devices)


THREE = cluster(level(8, 400e9, 1e-6), level(32, 50e9, 100e-6), level(256, 50e9, 10e-3, oversubscription=4.0))


@pytest.mark.parametrize("group", [Group(1), Group(8), Group(4, 2), Group(4, 4, 2), Group(12, 16, 4)])
def test_a_group_is_told_by_its_ranks_in_any_order(group):
    ranks = group.ranks(32)
    assert Group.of(ranks) == Group.of(ranks[::-1]) == group


@pytest.mark.parametrize(
    "group", [Group(8), Group(4, 2), Group(64), Group(16, 4), Group(16, 16), Group(4, 64)]
)
def test_a_ring_takes_a_step_for_each_link_between_ranks_that_are_neighbours(group):
    ranks = [number * group.stride for number in range(group.size)]
    steps = sum(joining(THREE, one, two).latency for one, two in pairwise(ranks))
    tiny = 1e-3  # bytes
    assert algorithm_seconds("all_gather", tiny, group, THREE)["ring"] == pytest.approx(steps, rel=1e-6)


@pytest.mark.parametrize("group", [Group(8), Group(4, 2), Group(64), Group(16, 4), Group(8, 32), Group(256)])
def test_an_all_to_all_takes_as_long_as_the_busiest_links_that_counting_pairs_gives(group):
    ranks = [number * group.stride for number in range(group.size)]
    sent = dict.fromkeys(THREE.levels, 0.0)
    steps = 0.0
    for other in ranks[1:]:
        used = joining(THREE, 0, other)
        sent[used] += S / group.size
        steps += used.latency
    busiest = max(nbytes / each.rate(group.size) for each, nbytes in sent.items())
    assert collective_seconds("all_to_all", S, group, THREE) == pytest.approx(steps + busiest, rel=EXACT)


@pytest.mark.parametrize("inside", [400e9, 150e9])  # above and below what 8 interfaces carry
def test_a_flat_ring_over_nodes_is_as_quick_as_the_narrower_of_the_nodes_links_and_interfaces(inside):
    n = G * K
    moved = 2 * (n - 1) / n * S / min(inside, G * NETWORK)
    steps = 2 * (K * (G - 1) * A_I + (K - 1) * A_E)
    assert seconds("all_reduce", "ring", two_levels(inside=inside)) == pytest.approx(steps + moved, rel=EXACT)


def test_three_collectives_in_a_row_make_the_all_reduce_of_two_levels():
    machine = two_levels()
    steps = [
        algorithm_seconds("reduce_scatter", S, Group(G), machine),
        algorithm_seconds("all_reduce", S / G, Group(K, G), machine),
        algorithm_seconds("all_gather", S, Group(G), machine),
    ]
    formula = (
        2 * ((G - 1) * A_I + (G - 1) / G * S / INSIDE) + 2 * (K - 1) * A_E + 2 * (K - 1) / K * S / G / NETWORK
    )
    assert sum(each["ring"] for each in steps) == pytest.approx(formula, rel=EXACT)


def test_an_all_to_all_over_nodes_is_bound_by_what_each_interface_sends_to_others():
    n = G * K
    steps = (G - 1) * A_I + (n - G) * A_E
    moved = S * (n - G) / (n * NETWORK)
    assert seconds("all_to_all", "pairwise", two_levels()) == pytest.approx(steps + moved, rel=EXACT)


def test_in_the_network_each_byte_goes_up_once():
    machine = two_levels(reduces=(False, True))
    once = S / (G * NETWORK * machine.levels[1].reduction_share)
    steps = 2 * 3 * A_I + A_E  # down and up a tree of 8, and once to the switch
    assert seconds("all_reduce", "switch", machine) == pytest.approx(in_chunks(steps, A_E, once), rel=CHUNKS)


def test_where_node_and_network_add_up_each_byte_goes_up_once_at_both():
    machine = two_levels(reduces=(True, True))
    share = machine.levels[0].reduction_share
    once = max((G + 1) / G * S / (INSIDE * share), S / (G * NETWORK * share))
    expected = in_chunks(A_I + A_E, A_E, once)
    assert seconds("all_reduce", "switch", machine) == pytest.approx(expected, rel=CHUNKS)
    one_of_each_node = algorithm_seconds("all_reduce", S, Group(K, G), machine)["switch"]
    assert one_of_each_node == pytest.approx(A_E + S / (NETWORK * share), rel=EXACT)


@pytest.mark.parametrize(("nodes", "busiest"), [(2, 1), (3, 1.5), (4, 2), (16, 2)])
def test_nodes_that_add_up_inside_are_joined_by_trees_between_them(nodes, busiest):
    machine = two_levels(nodes, reduces=(True, False))
    steps = A_I + 2 * math.ceil(math.log2(nodes)) * A_E
    moved = busiest * S / (G * NETWORK)
    assert seconds("all_reduce", "switch", machine) == pytest.approx(in_chunks(steps, A_E, moved), rel=CHUNKS)


@pytest.mark.parametrize("nbytes", [1e3, 1e6, 1e9, 1e12])
def test_trees_over_levels_take_their_steps_for_small_buffers_and_their_bytes_for_large_ones(nbytes):
    steps = 2 * (3 * A_I + 2 * A_E)
    moved = 2 * nbytes / (G * NETWORK)
    found = seconds("all_reduce", "tree", two_levels(), nbytes=nbytes)
    assert max(steps, moved) < found
    assert found == pytest.approx(in_chunks(steps, A_E, moved), rel=CHUNKS)
    assert found == pytest.approx(steps + moved, rel=1.0)  # never more than twice that, in the middle


def test_two_nodes_alone_are_quicker_than_any_larger_number():
    large = 16 * 2**30
    two, four, eight = (
        collective_seconds("all_reduce", large, Group(G * k), two_levels(k)) for k in (2, 4, 8)
    )
    assert two < 0.6 * four
    assert eight == pytest.approx(four, rel=0.05)  # 2(n-1)/n of 32 and 64 differ by 2 %, steps by less


def test_rings_and_trees_each_have_their_sizes():
    machine = two_levels(8)
    small, large = (algorithm_seconds("all_reduce", nbytes, Group(64), machine) for nbytes in (1e4, 1e11))
    assert small["tree"] < small["ring"]
    assert large["ring"] < large["tree"]


def test_the_half_size_is_where_a_buffer_takes_twice_its_bytes_and_counts_at_the_outermost_level():
    inner, outer = level(8, 400e9, 0.0, half_size=1e6), level(32, 25e9, 0.0, half_size=S)
    machine = cluster(inner, outer)
    plain = cluster(level(8, 400e9, 0.0), level(32, 25e9, 0.0))
    slowed = collective_seconds("all_gather", S, Group(32), machine)
    assert slowed == pytest.approx(2 * collective_seconds("all_gather", S, Group(32), plain), rel=EXACT)


def test_every_collective_begins_and_ends_once_at_the_cost_of_the_innermost_links():
    with_setup = cluster(level(8, 400e9, A_I, setup=20e-6), level(32, 25e9, A_E))
    without = cluster(level(8, 400e9, A_I), level(32, 25e9, A_E))
    for group in (Group(8), Group(4, 8), Group(32)):
        for collective in ("all_reduce", "all_gather", "broadcast", "all_to_all"):
            longer = collective_seconds(collective, S, group, with_setup)
            shorter = collective_seconds(collective, S, group, without)
            assert longer - shorter == pytest.approx(20e-6, rel=1e-6)


def test_a_group_of_some_in_a_mesh_has_only_the_links_among_them():
    mesh = cluster(level(8, 700e9, 0.0, mesh=True))
    assert collective_seconds("all_gather", S, Group(2), mesh) == pytest.approx(S / 2 / 100e9, rel=EXACT)
    assert collective_seconds("all_gather", S, Group(8), mesh) == pytest.approx(S * 7 / 8 / 700e9, rel=EXACT)
    assert message_seconds(S, NEXT, mesh) == pytest.approx(S / 100e9, rel=EXACT)


def test_a_ring_through_pods_is_not_slowed_by_a_spine_that_an_all_to_all_is_slowed_by():
    def machine(oversubscription):
        return cluster(level(8, 400e9), level(64, 50e9), level(512, 50e9, oversubscription=oversubscription))

    full, thin = machine(1.0), machine(7.0)
    ring = [collective_seconds("all_gather", S, Group(512), each) for each in (full, thin)]
    exchange = [collective_seconds("all_to_all", 64 * S, Group(512), each) for each in (full, thin)]
    assert ring[0] == ring[1]
    assert exchange[1] == pytest.approx(7 * exchange[0], rel=0.05)  # but for the steps


def test_a_message_goes_over_the_links_that_join_both_ranks():
    machine = two_levels()
    assert message_seconds(S, NEXT, machine) == pytest.approx(A_I + S / INSIDE, rel=EXACT)
    assert message_seconds(S, Boundary(0, 8, Group(1)), machine) == pytest.approx(
        A_E + S / NETWORK, rel=EXACT
    )


def test_nobody_to_talk_to_and_nothing_to_say_take_no_time():
    assert collective_seconds("all_reduce", S, Group(1), two_levels()) == 0
    assert collective_seconds("all_reduce", 0, Group(8), two_levels()) == 0


@given(
    collective=st.sampled_from(
        ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all"]
    ),
    nbytes=st.floats(1, 1e12),
    size=st.sampled_from([2, 4, 8, 32, 128]),
    stride=st.sampled_from([1, 2, 8]),
)
def test_more_bytes_never_take_less_time(collective, nbytes, size, stride):
    machine = Cluster.preset("aws-p5", 1024)
    group = Group(size, stride)
    less, more = (collective_seconds(collective, each, group, machine) for each in (nbytes, 1.5 * nbytes))
    assert 0 < less < more


def test_b200_on_four_nodes_lies_between_what_the_interfaces_alone_and_two_levels_in_a_row_take():
    """4 GiB on 4 x 8: 16.1 ms by interfaces, 20.8 by ring, 26.3 by levels; stas00/ml-engineering: 22.05."""
    nbytes, node, network = 4 * 2**30, 737e9, 50e9  # of the node what it was measured to reach
    machine = cluster(level(8, node, 0.0), level(32, network, 0.0))
    interfaces = algorithm_seconds("all_reduce", nbytes / 8, Group(4, 8), machine)["ring"]
    inside = algorithm_seconds("all_gather", nbytes, Group(8), machine)["ring"]
    ring = algorithm_seconds("all_reduce", nbytes, Group(32), machine)["ring"]
    assert interfaces == pytest.approx(16.1e-3, rel=0.005)  # as many digits as the figures have
    assert interfaces + 2 * inside == pytest.approx(26.3e-3, rel=0.005)
    assert ring == pytest.approx(20.8e-3, rel=0.005)
    predicted = collective_seconds("all_reduce", nbytes, Group(32), Cluster.preset("aws-p6-b200", 32))
    assert predicted == pytest.approx(22.05e-3, rel=0.1)


PUBLISHED = [  # preset, ranks, algorithm, GiB, GB/s of bus bandwidth; stas00/ml-engineering and aws-samples
    ("aws-p5en", 4, "ring", 8, 363.3),
    ("aws-p5en", 6, "ring", 8, 365.1),
    ("aws-p5en", 8, "ring", 8, 365.6),
    ("aws-p5en", 5, "switch", 8, 414.2),
    ("aws-p5en", 6, "switch", 8, 435.6),
    ("aws-p5en", 7, "switch", 8, 460.0),
    ("aws-p5en", 8, "switch", 8, 473.1),
    ("aws-p6-b200", 4, "ring", 8, 673.2),
    ("aws-p6-b200", 8, "ring", 8, 682.2),
    ("aws-p6-b200", 6, "switch", 8, 778.2),
    ("aws-p6-b200", 7, "switch", 8, 811.2),
    ("aws-p6-b200", 8, "switch", 8, 838.0),
    ("mi300x-node", 2, "ring", 4, 47.7),
    ("mi300x-node", 8, "ring", 4, 312.9),
]


@pytest.mark.parametrize(("preset", "ranks", "algorithm", "gib", "busbw"), PUBLISHED)
def test_published_rates_of_large_buffers_by_algorithm_and_ranks_are_met(
    preset, ranks, algorithm, gib, busbw
):
    """Within 7 %: a link has one share for any number of ranks. NVLink's differ by 2 %, xGMI's by 7."""
    nbytes = gib * 2**30
    found = algorithm_seconds("all_reduce", nbytes, Group(ranks), Cluster.preset(preset))[algorithm]
    assert 2 * (ranks - 1) / ranks * nbytes / found == pytest.approx(busbw * 1e9, rel=0.07)


def test_a_collective_loads_a_device_as_much_as_its_links_let_it():
    """By the rate at which its bytes go through a device, over that of the innermost links."""
    machine = cluster(level(8, 400e9), level(64, 50e9))
    assert collective_load(Group(1), machine) == 0
    assert collective_load(Group(8), machine) == collective_load(Group(4), machine) == 1
    assert collective_load(Group(8, stride=8), machine) == pytest.approx(50 / 400)  # a network link each
    assert collective_load(Group(16, stride=4), machine) == pytest.approx(2 * 50 / 400)
    assert collective_load(Group(64), machine) == 1  # rings use all eight at once


@given(st.sampled_from((1, 2, 8)), st.sampled_from((2, 4, 8)), st.floats(1e9, 1e12))
def test_no_collective_loads_a_device_more_than_the_innermost_links_do(stride, size, rate):
    machine = cluster(level(8, 100e9), level(64, rate))
    assert 0 < collective_load(Group(size, stride), machine) <= 1
