"""Which device a rank drives, and which backend ranks on GPUs have."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from shoal.errors import ConfigError
from shoal.launch.local import World, choose_device, join
from shoal.launch.local import world as ranks_world
from shoal.launch.local.world import backend_for, identity_of, reports_failures
from shoal.parallel import own_device


@pytest.mark.parametrize(
    ("asked", "gpus", "local_rank", "device"),
    [
        ("auto", 0, 3, "cpu"),
        ("cpu", 8, 3, "cpu"),
        ("auto", 8, 3, "cuda:3"),
        ("cuda", 1, 3, "cuda:0"),  # each rank sees one GPU, or all share the host's only one
        ("cuda", 2, 3, "cuda:1"),
    ],
)
def test_ranks_of_a_host_take_its_gpus_in_turn(asked, gpus, local_rank, device):
    with patch.object(torch.cuda, "device_count", lambda: gpus):
        assert choose_device(asked, local_rank) == torch.device(device)


def test_a_gpu_that_torch_does_not_find_is_refused():
    with pytest.raises(ConfigError, match="torch finds no GPU"):
        choose_device("cuda", 0)
    with pytest.raises(ConfigError, match="torch finds no GPU"):
        own_device("cuda")


def test_a_rank_makes_its_gpu_the_current_one():
    current = []
    stand_ins = {"is_available": lambda: True, "current_device": lambda: 2, "set_device": current.append}
    with patch.multiple(torch.cuda, **stand_ins):
        assert own_device("cuda") == torch.device("cuda", 2)
        assert own_device("cuda:1") == torch.device("cuda", 1)
    assert current == [torch.device("cuda", 2), torch.device("cuda", 1)]


def test_ranks_that_share_a_gpu_have_the_backend_shoal():
    assert backend_for(["a", "b", "c"]) == "cpu:gloo,cuda:nccl"
    assert backend_for(["a", "b", "a"]) == "shoal"
    with (
        patch.object(ranks_world, "is_built", lambda: False),
        pytest.raises(ConfigError, match="2 ranks share"),
    ):
        backend_for(["a", "b", "a"])


def test_only_nccl_reports_no_failure_of_a_collective():
    assert not reports_failures(backend_for(["a", "b"]))
    assert all(reports_failures(each) for each in ("gloo", "shoal", "cpu:shoal,cuda:shoal"))


def join_on(gpus: list[str], port: int) -> tuple[str, list[str], list[bool]]:
    """This rank's backends, what all ranks tell each other, and whether it had a group when it was told.

    Each rank has a GPU of this name.
    """
    had_group: list[bool] = []
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    world = World(rank=rank, ranks=ranks, local_rank=rank, master=("127.0.0.1", port))
    with (
        patch.object(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=gpus[rank])),
        patch.object(ranks_world, "_NCCL", "cpu:gloo,cuda:gloo"),  # this torch has no NCCL
    ):
        assert identity_of(torch.device("cuda", 0)) == gpus[rank]
        told_before = lambda backend: had_group.append(dist.is_initialized())  # noqa: E731
        join(world, torch.device("cuda", 0), timeout=120, beforehand=told_before)
    told = [""] * ranks
    dist.all_gather_object(told, f"rank {rank}")
    return dist.get_backend_config(), told, had_group


@pytest.mark.parametrize(
    ("gpus", "backends"),
    [(["a", "b", "a"], "cpu:shoal,cuda:shoal"), (["a", "b", "c"], "cpu:gloo,cuda:gloo")],
)
def test_ranks_ask_each_other_whether_they_share_a_gpu(ranks, gpus, backends):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = ["rank 0", "rank 1", "rank 2"]
    assert ranks.run(join_on, 3, gpus, port) == [(backends, told, [False])] * 3
