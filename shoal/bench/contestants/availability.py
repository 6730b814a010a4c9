"""Checks whether a contestant can take part here, before any process is started."""

from __future__ import annotations

from importlib.util import find_spec

import torch
import torch.distributed as dist

from shoal.bench.contestants.oneccl import find_oneccl
from shoal.collectives.core import is_built
from shoal.errors import ConfigError, MissingExtraError


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
