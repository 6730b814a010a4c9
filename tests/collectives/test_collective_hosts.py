"""The backend between hosts: ranks that take themselves to be on several, and network namespaces."""

import os
import socket
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from collective_cases import run_cases

from shoal.collectives import Options
from shoal.collectives.options import address_towards, find_interface_address
from shoal.errors import ConfigError
from shoal.testing import RankPool
from shoal.testing.hosts import Hosts, enter_host, why_no_hosts

NETWORK_ALGORITHMS = {
    "all_reduce": ("two-shot", "ring", "halving-doubling", "double-tree", "hierarchical"),
    "all_gather": ("direct", "ring", "recursive", "hierarchical"),
    "reduce_scatter": ("direct", "ring", "recursive", "hierarchical"),
    "broadcast": ("tree", "chain"),
    "reduce": ("tree", "chain"),
}


@pytest.fixture(scope="module")
def pool():
    with RankPool("shoal") as ranks:
        yield ranks


@pytest.mark.parametrize(("ranks", "ranks_per_host"), [(2, 1), (4, 2), (3, 2), (5, 3)])
def test_collectives_over_hosts_give_what_one_process_computes(pool, ranks, ranks_per_host):
    pool.run(run_cases, ranks, 5, 6, {}, ranks_per_host)


@pytest.mark.parametrize("turn", range(5))
def test_every_algorithm_over_hosts_gives_the_same(pool, turn):
    forced = {collective: names[turn % len(names)] for collective, names in NETWORK_ALGORITHMS.items()}
    pool.run(run_cases, 4, turn, 3, forced, 2)


def group_of_hosts(ranks_per_host, options=None, **environment):
    """A new group of all ranks, which take themselves for several hosts."""
    hosts = {"SHOAL_HOST_ID": f"host {dist.get_rank() // ranks_per_host}", **environment}
    with mock.patch.dict(os.environ, hosts):
        return dist.new_group(pg_options=options or Options())


def reduce_large():
    """All-reduces what takes many pieces, of several types, in two levels, with slices of odd sizes."""
    group = group_of_hosts(2, Options(algorithms={"all_reduce": "hierarchical"}), SHOAL_INTERFACE="127.0.0.1")
    size = dist.get_world_size()
    for dtype in (torch.float32, torch.int64, torch.bfloat16):
        ramp = torch.arange(1_500_001).remainder(64).to(dtype)
        tensor = ramp + dist.get_rank()
        dist.all_reduce(tensor, group=group)
        assert torch.equal(tensor, ramp * size + sum(range(size))), dtype
    dist.destroy_process_group(group)


@pytest.mark.parametrize("ranks", [3, 4])
def test_a_large_all_reduce_in_two_levels_is_exact(pool, ranks):
    pool.run(reduce_large, ranks)


def reduce_over(interface):
    group = group_of_hosts(1, SHOAL_INTERFACE=interface)
    tensor = torch.full((70_000,), float(dist.get_rank() + 1))
    dist.all_reduce(tensor, group=group)
    assert bool((tensor == 3.0).all())
    dist.destroy_process_group(group)


def has_ipv6_loopback():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6_loopback(), reason="this machine has no IPv6 loopback")
def test_hosts_reach_each_other_over_ipv6(pool):
    pool.run(reduce_over, 2, "::1")


def test_an_interface_can_be_named(pool):
    pool.run(reduce_over, 2, "lo")


def test_the_interface_is_the_one_on_the_route():
    assert address_towards("127.0.0.1") == "127.0.0.1"


def test_an_interface_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(ConfigError, match="lo"):
        find_interface_address("l0")


NO_HOSTS = why_no_hosts()
needs_hosts = pytest.mark.skipif(bool(NO_HOSTS), reason=NO_HOSTS or "hosts can be emulated")
PORT = 29_500
REDUCED_BYTES = 8 << 20


def reduce_on_host(processes, ranks_per_host, address):
    """Forms a group across namespaces and all-reduces on it; every rank is in a new process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # those of the loopback have to be formed before the namespace is left
    dist.destroy_process_group()
    enter_host(processes[rank // ranks_per_host])
    with mock.patch.dict(os.environ, {"MASTER_ADDR": address, "MASTER_PORT": str(PORT)}):
        dist.init_process_group("shoal", rank=rank, world_size=size)
        tensor = torch.full((REDUCED_BYTES // 4,), float(rank + 1))
        dist.all_reduce(tensor)
        dist.destroy_process_group()
    return bool((tensor == sum(range(size + 1))).all())


@needs_hosts
def test_namespaces_are_hosts_and_what_crosses_between_them_is_what_the_formula_says():
    with Hosts(2) as hosts, RankPool("gloo") as fresh:
        before = [hosts.traffic(host) for host in range(2)]
        processes = [hosts.process(host) for host in range(2)]
        assert all(fresh.run(reduce_on_host, 4, processes, 2, hosts.addresses[0]))
        for host in range(2):
            sent = (hosts.traffic(host) - before[host]).sent_payload
            # 2 (k - 1)/k S with two hosts; the store, the handshakes and the heartbeats are beside it.
            assert REDUCED_BYTES <= sent < 1.02 * REDUCED_BYTES


@needs_hosts
def test_hosts_are_gone_after_use():
    with Hosts(2, rate=1e9) as hosts:
        process = hosts.process(0)
    assert not os.path.exists(f"/proc/{process}/ns/net")
