"""The device of a rank, and a model or a few numbers on it."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.distributed as dist
from torch import nn

from shoal.collectives.thread_device import note_device
from shoal.errors import ConfigError


def own_device(device: torch.device | str) -> torch.device:
    """Return the device of this rank with its index, and make it the current one if it is a GPU.

    Libraries allocate on the current device, and NCCL communicates from it. "cuda" without an index is the
    GPU that the default process group was formed with, or else the current one.

    Raises:
        ConfigError: torch does not find the device on this host.
    """
    try:
        device = torch.device(device)
        torch.empty(0, device=device if device.type != "cuda" else "cpu")
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"device={device} was given, and torch cannot use it here: {str(error).splitlines()[0]}",
            possible="cpu, or cuda on a host with a GPU",
            change="give device=cpu",
        ) from error
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device={device} was given, and torch finds no GPU on this host",
            possible="device=cpu",
            change="give device=cpu, or install a torch with CUDA",
        )
    if device.index is None:
        bound: torch.device | None = getattr(dist.group.WORLD, "bound_device_id", None)
        device = bound or torch.device("cuda", torch.cuda.current_device())
    torch.cuda.set_device(device)
    note_device(device.index)
    return device


def place(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """Move a model to this rank's device, and return the device; what is on the meta device stays there.

    Args:
        model: A model with parameters.
        device: The device; None for the one that the model is on, and the CPU for the meta device.
    """
    if device is None:
        here = next(model.parameters()).device
        return own_device("cpu" if here.type == "meta" else here)
    there = own_device(device)
    tensors = (*model.parameters(), *model.buffers())
    if any(not tensor.is_meta and tensor.device != there for tensor in tensors):
        model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(there))
    return there


@lru_cache(maxsize=256)
def on_device(numbers: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Return numbers on a device; copied there once, because the host waits for that."""
    return torch.tensor(numbers, device=device)
