"""Makes a contestant from its name, on every rank at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from datetime import timedelta
from importlib.util import find_spec

import torch
import torch.distributed as dist

from shoal.collectives.ctypes_core import is_built
from shoal.collectives.options import Options
from shoal.collectives.sharded_buffers import empty
from shoal.errors import ConfigError, MissingExtraError
from shoal.machine.bench.contestants.contestant import Contestant, PrivateMemory, TorchGroup
from shoal.machine.bench.contestants.oneccl import MPI, OneCCL, find_oneccl

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


def require_available(name: str) -> None:
    """Check that the contestant can take part.

    Raises:
        ConfigError: It cannot; the message says what is missing.
        MissingExtraError: A Python package is missing.
    """
    match name:
        case "shoal" | "shoal-shared":
            _require_shoal(name)
        case "nccl":
            _require_nccl()
        case "mpi":
            _require_mpi4py(name)
        case "oneccl":
            _require_mpi4py(name)
            _require_oneccl()


def _require_shoal(name: str) -> None:
    if not is_built():
        raise ConfigError(
            f"--backend {name} needs Shoal's native core, which is not built",
            possible="a core that was compiled when Shoal was installed",
            change="install Shoal again with a C++20 compiler present, or measure another backend",
        )


def _require_mpi4py(name: str) -> None:
    if find_spec("mpi4py") is None:
        raise MissingExtraError(f"the backend {name}", package="mpi4py", extra="mpi")


def _require_oneccl() -> None:
    if find_oneccl() is None:
        raise ConfigError(
            "--backend oneccl needs oneCCL, which this Python's environment does not have",
            possible="oneCCL 2022 or newer, and Intel MPI",
            change="run: pip install oneccl impi-rt impi-devel",
        )


def _require_nccl() -> None:
    if not dist.is_nccl_available() or not torch.cuda.is_available():
        lacks = "this torch was built without it" if torch.cuda.is_available() else "torch finds no GPU"
        raise ConfigError(
            f"--backend nccl cannot run here: {lacks}",
            possible="a torch with NCCL, and one GPU for each rank",
            change="measure another backend",
        )
