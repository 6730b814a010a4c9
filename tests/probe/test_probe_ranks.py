"""The probe on ranks of this machine, some of them made to take themselves for hosts of their own."""

import os
from unittest.mock import patch

import pytest

from shoal.errors import WorkerError
from shoal.testing import RankPool

SIZES = (4 << 10, 1 << 20)


@pytest.fixture(scope="module")
def pool():
    with RankPool("gloo") as ranks:
        yield ranks


def place_of(backend, host_of=None):
    import torch.distributed as dist

    from shoal.machine.bench.settings import Ranks
    from shoal.machine.probe import Place

    rank = dist.get_rank()
    os.environ.pop("SHOAL_HOST_ID", None)
    if host_of is not None:
        os.environ["SHOAL_HOST_ID"] = f"host {host_of[rank]}"
    return Place.find(Ranks(rank, dist.get_world_size(), rank), backend)


def probed():
    """Of fewer and smaller shapes than are measured otherwise."""
    import shoal.machine.probe.device as device
    from shoal.machine.probe import Effort, probe

    fewer = {"_SQUARES": (64, 128, 256), "_SKEWED": device._SKEWED[:3], "_TOKENS": (512,)}
    with patch.multiple(device, **fewer):
        return probe(place_of("gloo"), "here", Effort(1, 1e-3, SIZES), lambda text: None)


def attention_with_a_slow_forward():
    """Rank 1 takes longer for a forward than for forward and backward together."""
    import torch.distributed as dist

    import shoal.machine.probe.device as device
    from shoal.machine.probe import Effort
    from shoal.machine.probe.probe import median_of_ranks

    usual = device.time_on_device

    def disturbed(operations, place, effort):
        is_slow = dist.get_rank() == 1
        return {key: 1.0 if is_slow and key == slow_key else 0.3 if key[1] else 0.1 for key in operations}

    slow_key = ((256, 4, 2, 32), False)
    device.time_on_device = disturbed
    place = place_of("gloo")
    try:
        return median_of_ranks(place, device.measure_attention(place, Effort(1, 1e-3, SIZES)))
    finally:
        device.time_on_device = usual


def first_uses_of_groups(host_of):
    """What each group does first on this rank when pairs of hosts are measured; with 3 hosts one is odd."""
    import torch.distributed as dist

    import shoal.machine.probe.links as links

    first, all_reduce, exchange = {}, dist.all_reduce, links._exchange

    def noted_all_reduce(tensor, *arguments, group=None, **named):
        first.setdefault(group, "collective")
        return all_reduce(tensor, *arguments, group=group, **named)

    def noted_exchange(group, *arguments):
        first.setdefault(group, "messages")
        exchange(group, *arguments)

    with patch.object(dist, "all_reduce", noted_all_reduce), patch.object(links, "_exchange", noted_exchange):
        links.measure_hosts(place_of("gloo", host_of))
    return [use for group, use in first.items() if group is not None]


def measured_links(host_of):
    from shoal.machine.probe.links import measure_hosts, measure_links
    from shoal.machine.probe.place import Effort

    place = place_of("gloo", host_of)
    return place.hosts, measure_links(place, Effort(1, 1e-3, SIZES)), measure_hosts(place)


def test_two_ranks_give_one_cluster_of_two_devices_with_a_cost_for_everything(pool):
    first, second = pool.run(probed, 2, timeout=120)
    assert first == second
    cluster = first.cluster
    assert cluster.devices == cluster.devices_per_node == 2
    assert set(cluster.device.peak) == {"fp32", "bf16"}
    assert {each.quantity for each in first.errors} == {
        "products fp32",
        "products bf16",
        "passes over memory",
        "streams",
        "attention forward",
        "attention backward",
        *(
            f"{name}, inside a host"
            for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
        ),
    }
    assert len(first.measurements.paces) == 2


def test_a_backward_that_noise_made_less_than_nothing_is_left_out_on_all_ranks(pool):
    first, second = pool.run(attention_with_a_slow_forward, 2)
    assert first == second
    assert [each.half for each in first if each.attention.length == 256] == ["forward", "forward", "backward"]
    assert all(each.seconds > 0 for each in first)


def test_hosts_are_measured_inside_between_all_and_between_ranks_of_the_same_place(pool):
    hosts, links, rates = pool.run(measured_links, 4, (0, 0, 1, 1))[0]
    assert hosts == ((0, 1), (2, 3))
    forms = {(each.level, each.group.size, each.group.stride) for each in links if hasattr(each, "group")}
    assert forms == {(0, 2, 1), (1, 4, 1), (1, 2, 2)}
    assert {(each.level, each.distance) for each in links if hasattr(each, "distance")} == {(0, 1), (1, 2)}
    assert all(each.seconds > 0 for each in links)
    assert rates == (), "two hosts cannot tell a slow link from a slow adapter"


def test_four_hosts_are_paired_with_both_neighbours_and_with_far_ones(pool):
    _, links, rates = pool.run(measured_links, 4, (0, 1, 2, 3))[0]
    assert {each.level for each in links} == {1}
    paired = {each.pairing: set(each.rates) for each in rates}
    assert paired == {"even": {0, 1, 2, 3}, "odd": {0, 1, 2, 3}, "far": {0, 1, 2, 3}, "alone": {0, 2}}


def test_hosts_with_unequal_numbers_of_ranks_are_refused(pool):
    with pytest.raises(WorkerError, match="the hosts have 2, 1 ranks"):
        pool.run(measured_links, 3, (0, 0, 1))


def test_all_ranks_of_a_group_join_its_first_operation(pool):
    """NCCL forms a group then, and waits for all its ranks: also for a host that has no pair."""
    assert pool.run(first_uses_of_groups, 3, (0, 1, 2)) == [["collective"]] * 3
