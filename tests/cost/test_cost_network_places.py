"""Where ranks sit, rails, oversubscription and protocols: collectives' seconds, held to formulas."""

from dataclasses import replace

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

from shoal.predict.cost.collectives.network import algorithm_seconds, collective_seconds
from shoal.spec.cluster import Cluster
from shoal.spec.plan import Group


def test_a_group_that_straddles_nodes_is_as_slow_as_the_instance_with_fewest_interfaces():
    """Ranks 6 to 11 of nodes of eight: two in the first node, four in the next."""
    machine = two_levels(nodes=6)
    ring = algorithm_seconds("all_gather", S, Group(6), machine)["ring"]
    assert ring == pytest.approx(4 * A_I + A_E + 5 / 6 * S / (2 * NETWORK), rel=EXACT)
    exchange = collective_seconds("all_to_all", S, Group(6), machine)
    assert exchange == pytest.approx(A_I + 4 * A_E + 4 / 6 * S / NETWORK, rel=EXACT)


def test_a_stride_that_no_node_divides_leaves_each_member_alone_in_its_node():
    ring = algorithm_seconds("all_gather", S, Group(4, 12), two_levels(nodes=6))["ring"]
    assert ring == pytest.approx(3 * A_E + 3 / 4 * S / NETWORK, rel=EXACT)


def with_rails(inside, spine=None):
    around = [] if spine is None else [level(64, spine, A_E)]
    return cluster(level(G, inside, A_I), level(G * K, NETWORK, A_E, rails=True), *around)


def test_over_rails_bytes_between_places_load_the_links_inside_a_node_too():
    inside = 20e9  # slower than an interface, so that these links decide
    plain = seconds("all_to_all", "pairwise", two_levels(inside=inside))
    railed = seconds("all_to_all", "pairwise", with_rails(inside))
    n, between = G * K, G * (K - 1)
    steps = (G - 1) * A_I + between * A_E
    displaced = between * (G - 1) / G
    assert plain == pytest.approx(steps + between / n * S / NETWORK, rel=EXACT)
    assert railed == pytest.approx(steps + (G - 1 + displaced) / n * S / inside, rel=EXACT)


def test_over_rails_members_of_equal_places_and_rings_are_not_slowed():
    for collective, group in (("all_to_all", Group(K, G)), ("all_gather", Group(G * K))):
        plain, railed = (
            collective_seconds(collective, S, group, each) for each in (two_levels(), with_rails(INSIDE))
        )
        assert plain == railed


def test_bytes_between_places_take_the_level_around_the_rails_if_it_is_quicker_than_the_node():
    slow, quick = (
        algorithm_seconds("all_to_all", S, Group(G * K), with_rails(20e9, spine))["pairwise"]
        for spine in (10e9, 100e9)
    )
    assert quick < slow == pytest.approx(seconds("all_to_all", "pairwise", with_rails(20e9)), rel=EXACT)


@given(st.integers(2, 64), st.sampled_from([1, 2, 3, 8, 12]), st.floats(1, 16))
def test_an_oversubscribed_spine_slows_only_groups_that_leave_a_pod(size, stride, factor):
    def machine(oversubscription):
        return cluster(level(8, 400e9), level(192, 50e9), level(768, 50e9, oversubscription=oversubscription))

    group = Group(size, stride)
    free, thin = (collective_seconds("all_to_all", S, group, machine(each)) for each in (1.0, factor))
    assert free <= thin
    if 192 % (size * stride) == 0:
        assert free == thin


LIKE_NCCL = {"slices": 2, "packet_latency": 1e-6, "packet_share": 0.25, "copy_rate": 800e9, "setup": 6e-6}


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("nbytes", [1e3, 1e5, 1e6, 1e7, 1e9])
def test_a_ring_takes_the_protocol_that_is_quicker(n, nbytes):
    chunk = nbytes / n
    packets = (n - 1) * (1e-6 + chunk / (0.25 * B))
    whole = (n - 1) * max(chunk / B, A + chunk / (2 * B)) + chunk / 800e9
    found = seconds("all_gather", "ring", one_level(n, **LIKE_NCCL), nbytes=nbytes)
    assert found == pytest.approx(6e-6 + min(packets, whole), rel=EXACT)


def test_few_steps_send_no_packets_above_the_limit():
    limited = {**LIKE_NCCL, "packet_limit": 1e5}
    for n, is_limited in ((2, True), (4, True), (5, False), (8, False)):
        free, bound = (
            seconds("all_gather", "ring", cluster(level(n, B, 50e-6, **fields)), nbytes=n * 2e5)
            for fields in (LIKE_NCCL, limited)
        )
        assert (free < bound) == is_limited


def test_an_all_to_all_has_several_messages_under_way_and_small_ones_go_in_packets():
    machine = one_level(8, peers=4, **LIKE_NCCL)
    large = seconds("all_to_all", "pairwise", machine)
    assert large == pytest.approx(6e-6 + 2 * A + 7 / 8 * S / B + S / 8 / 800e9, rel=EXACT)
    small = seconds("all_to_all", "pairwise", machine, nbytes=8 * 16384)
    assert small == pytest.approx(6e-6 + 2 * 1e-6 + 7 * 16384 / (0.25 * B), rel=EXACT)


def test_a_chain_makes_trees_as_deep_as_a_node_has_devices():
    machine = cluster(level(8, B, A, chain=True))
    assert seconds("all_reduce", "tree", machine) == pytest.approx(2 * 7 * A + 2 * S / B, rel=EXACT)


@given(
    collective=st.sampled_from(["all_reduce", "all_gather", "broadcast", "all_to_all"]),
    preset=st.sampled_from(["dgx-a100", "dgx-h100", "aws-p6-b200", "meta-24k"]),
    nbytes=st.floats(1e3, 1e11),
    size=st.integers(2, 600),
    stride=st.integers(1, 40),
    index=st.integers(0, 1),
    factor=st.floats(1, 8),
)
def test_quicker_links_never_make_a_collective_slower(
    collective, preset, nbytes, size, stride, index, factor
):
    machine = Cluster.preset(preset, 6144)
    levels = list(machine.levels)
    levels[index] = replace(levels[index], bandwidth=factor * levels[index].bandwidth)
    before, after = (
        min(algorithm_seconds(collective, nbytes, Group(size, stride), each).values())
        for each in (machine, machine.replace(levels=tuple(levels)))
    )
    assert after <= before * (1 + EXACT)
