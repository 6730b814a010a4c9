"""Makes a contestant from its name, on every rank at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from shoal.bench.contestants.contestant import Contestant
from shoal.bench.contestants.mpi import MPI
from shoal.bench.contestants.oneccl import OneCCL, find_oneccl
from shoal.bench.contestants.private_memory import PrivateMemory
from shoal.bench.contestants.torch_group import TorchGroup
from shoal.collectives.buffers import empty
from shoal.collectives.options import Options

_TIMEOUT = timedelta(seconds=120)  # for one operation: gigabytes may go over a slow link


def enter(name: str, *, algorithms: Mapping[str, str], local_rank: int) -> Contestant:
    """Make a contestant; every rank of the default group must call this.

    Args:
        name: One of `BACKENDS`, which must be available.
        algorithms: By collective, the algorithm that Shoal's backend must use.
        local_rank: This process's number on its host, which is that of the GPU that NCCL uses.
    """
    match name:
        case "shoal":
            return TorchGroup(name, _group("shoal", _options(algorithms)))
        case "shoal-shared":
            group = _group("shoal", _options(algorithms))
            return TorchGroup(name, group, empty, memory="shared")
        case "gloo":
            return TorchGroup(name, _group(name))
        case "nccl":
            device = torch.device("cuda", local_rank)
            torch.cuda.set_device(device)
            return TorchGroup(name, _group(name), memory="cuda", device=device)
        case "mpi":
            return MPI()
        case "oneccl":
            library = find_oneccl()
            assert library is not None  # require_available has checked this
            return OneCCL(library)
        case "memory":
            return PrivateMemory(dist.get_rank(), dist.get_world_size())
    raise AssertionError(name)


def _options(algorithms: Mapping[str, str]) -> Options:
    """Return the environment's options, with the algorithms that the bench must use."""
    options = Options.from_environment()
    return dataclasses.replace(options, algorithms={**options.algorithms, **algorithms})


def _group(backend: str, options: Options | None = None) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(backend=backend, timeout=_TIMEOUT, pg_options=options)
    return group
