"""Which device a rank drives, and whether ranks share one, which decides how they communicate."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.collectives import is_built
from shoal.errors import ConfigError

_NCCL = "cpu:gloo,cuda:nccl"
"""Backends of GPUs that are not shared: the CPU's is for Python objects, which so need no GPU."""


def reports_failures(backend: str) -> bool:
    """Return whether a collective raises an error if another rank of the group is lost.

    NCCL's do not: its kernels wait on the device, and its watchdog ends the process some time later.
    """
    return "nccl" not in backend


def choose_device(asked: str, local_rank: int) -> torch.device:
    """Return the device that a rank computes on.

    The ranks of a host take its GPUs in turn: each has its own, or several share one. A rank that sees a
    single GPU, as with srun's `--gpus-per-task=1`, takes that one.

    Args:
        asked: "cpu", "cuda", or "auto" for a GPU if the host has one.
        local_rank: Number of this rank on its host.

    Raises:
        ConfigError: A GPU is asked for, and torch finds none.
    """
    if asked == "cpu":
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if gpus:
        return torch.device("cuda", local_rank % gpus)
    if asked == "auto":
        return torch.device("cpu")
    built = "" if torch.backends.cuda.is_built() else "; this torch is built without CUDA"
    raise ConfigError(
        f"device={asked} was given, and torch finds no GPU on this host{built}",
        possible="cpu, or auto, which is the CPU here",
        change="leave out device=cuda, or install a torch with CUDA and show it a GPU (CUDA_VISIBLE_DEVICES)",
    )


def identity_of(device: torch.device) -> str:
    """Return a text that is equal for two ranks only if they drive the same GPU."""
    properties = torch.cuda.get_device_properties(device)
    return str(properties.uuid)


def sharing(identities: Sequence[str]) -> int:
    """Return the largest number of ranks that drive one GPU.

    Args:
        identities: The result of `identity_of` on each rank.
    """
    return max(identities.count(each) for each in set(identities))


def backend_for(identities: Sequence[str]) -> str:
    """Return the backend of ranks on GPUs: NCCL, or "shoal" if ranks share a GPU, which NCCL refuses.

    Args:
        identities: The result of `identity_of` on each rank.

    Raises:
        ConfigError: Ranks share a GPU, and the backend "shoal" is not built.
    """
    together = sharing(identities)
    if together == 1:
        return _NCCL
    if is_built():
        return "shoal"
    raise ConfigError(
        f"{together} ranks share a GPU, which NCCL refuses, and the native core of shoal is not built",
        possible="one rank for each GPU, or the backend shoal",
        change="start fewer ranks, or install g++ and then shoal again",
    )
