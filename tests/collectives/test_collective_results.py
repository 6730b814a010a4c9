"""What collectives give, among few ranks and more, by every algorithm, within a host and between hosts."""

from __future__ import annotations

import hashlib
import os
from functools import partial
from itertools import product
from unittest import mock

import collective_cases
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import ReduceOp
from torch.distributed.tensor import DTensor, Replicate

import shoal.collectives
from shoal.collectives import Options
from shoal.errors import CollectiveError
from shoal.predict.cost import ALGORITHMS

RANKS = 4
NAMES = {
    level: {
        collective: sorted(
            {name for each, name, where in ALGORITHMS if each == collective and where == level}
            - {"in-network"}  # it needs an aggregator, and has tests of its own
        )
        for collective, _, _ in ALGORITHMS
    }
    for level in ("shared-memory", "network")
}


def rounds_of(level: str) -> list[dict[str, str]]:
    """One algorithm for every collective, until each was used; those with fewer begin again."""
    names = {collective: found for collective, found in NAMES[level].items() if found}
    return [
        {collective: found[turn % len(found)] for collective, found in names.items()}
        for turn in range(max(map(len, names.values())))
    ]


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_collectives_within_a_host_give_what_one_process_computes(ranks, size):
    ranks.run(collective_cases.run_cases, size, size, 4)


def test_every_algorithm_within_a_host_gives_what_one_process_computes(ranks):
    for turn, algorithms in enumerate(rounds_of("shared-memory")):
        ranks.run(collective_cases.run_cases, 3, 100 + turn, 3, algorithms)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_may_not_read_each_others_memory_copy(ranks, size):
    ranks.run(partial(collective_cases.run_cases, direct_reads=False), size, 300 + size, 3)


@pytest.mark.parametrize("ranks_per_host", [1, 2])
def test_every_algorithm_between_hosts_gives_what_one_process_computes(ranks, ranks_per_host):
    for turn, algorithms in enumerate(rounds_of("network")):
        ranks.run(collective_cases.run_cases, 3, 200 + turn, 1, algorithms, ranks_per_host)


def test_shared_buffers_give_the_same_as_private_memory(ranks):
    for where in ("all", "some", "none"):
        ranks.run(reduce_shared_buffers, 3, where)


def reduce_shared_buffers(where: str) -> None:
    """All-reduce and all-gather where the tensors of all, of some, or of no ranks are in shared buffers."""
    rank, size = dist.get_rank(), dist.get_world_size()
    is_shared = where == "all" or (where == "some" and rank == 1)
    make = shoal.collectives.empty if is_shared else torch.empty
    for turn, count in enumerate((1, 1000, 70_001, 300_000)):
        inputs = [collective_cases.make(turn, each, count, torch.float32) for each in range(size)]
        whole = make(count + 3)
        own = whole[3:]
        own.copy_(inputs[rank])
        gathered = make(count * size)
        dist.all_gather_into_tensor(gathered, own)
        assert torch.equal(gathered, torch.cat(inputs))
        dist.all_reduce(own)
        assert torch.equal(own, sum(inputs))
        scattered = make(count)
        dist.reduce_scatter_tensor(scattered, gathered)
        assert torch.equal(scattered, size * inputs[rank])


def test_sums_of_random_floats_are_bitwise_the_same_on_all_ranks_and_in_every_run(ranks):
    first, second = (ranks.run(fingerprints, RANKS, "shared-memory") for _ in range(2))
    assert first == second
    assert all(each == first[0] for each in first)


def test_sums_between_hosts_are_bitwise_the_same_on_all_ranks_and_in_every_run(ranks):
    first, second = (ranks.run(fingerprints, RANKS, "network") for _ in range(2))
    assert first == second
    assert all(each == first[0] for each in first)


def fingerprints(level: str) -> dict[tuple[str, str, int, str], str]:
    """Hashes of what all-reduces of random floats give here, by algorithm, type, size and reduction."""
    rank = dist.get_rank()
    hosts = {"SHOAL_HOST_ID": f"host {rank // 2}", "MASTER_ADDR": "127.0.0.1"} if level == "network" else {}
    found = {}
    for algorithm in NAMES[level]["all_reduce"]:
        with mock.patch.dict(os.environ, hosts):
            group = dist.new_group(pg_options=Options(algorithms={"all_reduce": algorithm}))
        for dtype, count, op in product(
            (torch.float32, torch.bfloat16, torch.float16), (7, 4097, 50_001), (ReduceOp.SUM, ReduceOp.AVG)
        ):
            generator = torch.Generator().manual_seed(rank)
            tensor = torch.randn(count, generator=generator).to(dtype)
            dist.all_reduce(tensor, op, group=group)
            digest = hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()
            found[algorithm, str(dtype), count, str(op)] = digest
        dist.destroy_process_group(group)
    return found


def test_sums_of_16_bit_floats_are_rounded_once(ranks):
    ranks.run(compare_with_float64, RANKS)


def compare_with_float64() -> None:
    """One-shot and two-shot fold in float32: what is lost besides that is one rounding to the type."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for algorithm, dtype, op in product(
        ("one-shot", "two-shot"), (torch.bfloat16, torch.float16), (ReduceOp.SUM, ReduceOp.AVG)
    ):
        group = dist.new_group(pg_options=Options(algorithms={"all_reduce": algorithm}))
        inputs = [
            torch.randn(20_000, generator=torch.Generator().manual_seed(each)).to(dtype)
            for each in range(size)
        ]
        wanted = sum(each.double() for each in inputs) / (size if op == ReduceOp.AVG else 1)
        tensor = inputs[rank].clone()
        dist.all_reduce(tensor, op, group=group)
        # Half a unit in the last place, relative to the exact sum; float32's own roundings are far below the
        # rest of it, but where terms cancel they are absolute, of the size of the terms.
        eps = torch.finfo(dtype).eps
        bound = wanted.abs() * eps / 2 + size * 8 * torch.finfo(torch.float32).eps + torch.finfo(dtype).tiny
        assert ((tensor.double() - wanted).abs() <= bound).all(), (algorithm, dtype, op)
        dist.destroy_process_group(group)


def test_an_average_is_the_sum_over_the_number_of_ranks(ranks):
    ranks.run(average, 3)


def average() -> None:
    rank = dist.get_rank()
    for count in (3, 200_000):  # by one-shot, by two-shot
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            tensor = torch.full((count,), (rank + 1) * 10, dtype=dtype)
            dist.all_reduce(tensor, ReduceOp.AVG)
            assert (tensor == 20).all()


def refuse_without_memory() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    whole = DTensor.from_local(torch.ones(4), mesh, [Replicate()])
    freed = torch.ones(8)
    view = freed[4:]
    freed.untyped_storage().resize_(0)
    peer = 1 - rank
    for tensor in (whole, freed, view):
        other = torch.empty(size * tensor.numel())
        for call in (
            lambda tensor=tensor: dist.all_reduce(tensor),
            lambda tensor=tensor: dist.broadcast(tensor, 0),
            lambda tensor=tensor: dist.reduce(tensor, 0),
            lambda tensor=tensor, other=other: dist.all_gather_into_tensor(other, tensor),
            lambda tensor=tensor, other=other: dist.reduce_scatter_tensor(tensor, other),
            lambda tensor=tensor, other=other: dist.all_to_all_single(tensor, torch.empty(tensor.shape)),
            lambda tensor=tensor: dist.send(tensor, peer),
            lambda tensor=tensor: dist.recv(tensor, peer),
        ):
            with pytest.raises(
                CollectiveError, match=f"{type(tensor).__name__} of shape .* has no memory"
            ) as raised:
                call()
            assert raised.value.fault == "invalid"
    none = torch.empty(0)
    dist.all_reduce(none)  # has nothing to move, and needs no memory
    dist.all_reduce(whole.to_local())
    assert bool((whole.to_local() == size).all())


def test_a_tensor_without_memory_is_refused_by_name(ranks):
    ranks.run(refuse_without_memory, 2)
