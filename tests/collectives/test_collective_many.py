"""Many ranks and many groups: they form, give what one process computes, and keep few descriptors."""

import ctypes
import os
import resource
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist
from fault_ranks import Ranks

import shoal.collectives

assert shoal.collectives

PATIENCE = 120.0


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def start(rank: int, size: int, store: str, ranks_per_host: int) -> None:
    os.environ |= {"SHOAL_HOST_ID": f"host {rank // ranks_per_host}", "MASTER_ADDR": "127.0.0.1"}
    dist.init_process_group(
        "shoal", f"file://{store}", timedelta(seconds=PATIENCE), world_size=size, rank=rank
    )


def use_many_groups(
    tell: Connection, rank: int, size: int, store: str, groups: int, ranks_per_host: int
) -> None:
    """Forms groups of all ranks, of every second one and of pairs, and reduces in each of them."""
    soft, hard = 1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    start(rank, size, store, ranks_per_host)
    kinds = [range(size), range(0, size, 2), *([first, first + 1] for first in range(0, size, 2))]
    formed = []
    for number in range(groups):
        ranks = list(kinds[number % len(kinds)])
        group = dist.new_group(ranks)
        if rank in ranks:
            formed.append((ranks, group))
    opened = descriptors()
    for ranks, group in formed:
        tensor = torch.full((300,), float(rank))
        dist.all_reduce(tensor, group=group)
        assert bool((tensor == sum(ranks)).all()), ranks
    dist.barrier()
    dist.destroy_process_group()
    tell.send((opened, descriptors(), len(formed)))


# What a group takes of its own is the descriptor of its shared memory; what the process takes, one for each
# other process, and some for the interpreter, the store and the listener.
def check_descriptors(told: list[tuple[int, int, int]], size: int, before: int = 64) -> None:
    for opened, left, formed in told:
        assert opened <= before + size + formed
        assert left <= before


@pytest.mark.parametrize("ranks_per_host", [16, 4], ids=["one host", "four hosts"])
def test_sixteen_ranks_reduce_in_many_groups(ranks_per_host: int) -> None:
    with Ranks(use_many_groups, 16, 12, ranks_per_host) as ranks:
        check_descriptors(ranks.hear(patience=PATIENCE), 16)


@pytest.mark.long
@pytest.mark.parametrize("ranks_per_host", [64, 8], ids=["one host", "eight hosts"])
def test_sixty_four_ranks_reduce_in_a_hundred_groups(ranks_per_host: int) -> None:
    with Ranks(use_many_groups, 64, 100, ranks_per_host) as ranks:
        check_descriptors(ranks.hear(patience=10 * PATIENCE), 64)


def protect_memory() -> None:
    """Keeps other processes of this user from this one's memory, and this one from theirs, root too."""
    pr_set_dumpable, cap_sys_ptrace, version = 4, 19, 0x20080522
    libc = ctypes.CDLL(None)
    libc.prctl(pr_set_dumpable, 0, 0, 0, 0)
    header, sets = (ctypes.c_uint32 * 2)(version, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    for kind in range(3):  # effective, permitted, inheritable
        sets[kind] &= ~(1 << cap_sys_ptrace)
    assert libc.capset(header, sets) == 0


def guard_memory_and_reduce(tell: Connection, rank: int, size: int, store: str) -> None:
    protect_memory()
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.init_process_group("shoal", f"file://{store}", world_size=size, rank=rank)
    pair = dist.new_group([0, 1])
    tensor = torch.full((100_000,), float(rank + 1))
    dist.all_reduce(tensor, group=pair if rank < 2 else None)
    hosts = dist.group.WORLD.hosts  # type: ignore[union-attr]
    dist.barrier()
    dist.destroy_process_group()
    said = [str(each.message) for each in caught if "TCP" in str(each.message)]
    tell.send((float(tensor[-1]), hosts, said))


def test_ranks_that_may_not_share_memory_communicate_over_tcp_and_say_so_once() -> None:
    with Ranks(guard_memory_and_reduce, 2) as ranks:
        (first, hosts, said), (second, _, other) = ranks.hear(patience=PATIENCE)
        assert (first, second, hosts) == (3.0, 3.0, 2)
        assert len(said) + len(other) == 1
        assert "cannot map the memory of other processes" in (said + other)[0]
