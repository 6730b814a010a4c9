"""The device of a rank, and a model or a few numbers on it."""

from __future__ import annotations

import platform
from collections import Counter
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from shoal.collectives.thread_device import note_device
from shoal.collectives.values import all_gather_value
from shoal.errors import ConfigError
from shoal.models import Transformer
from shoal.spec.plan import Plan


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


_MARGIN = 0.1
"""Share of a GPU's memory that is left to CUDA itself, to NCCL's buffers and to gaps between tensors."""

_CONTEXT = 512 << 20
"""Bytes of a GPU that each further rank on it takes for a context and the code of kernels: a round figure."""

_OF_LOGITS = 1 / 8
"""Share of the memory that a micro-batch's logits may take: copies of them in fp32 take it several times."""

_FP32 = 4  # bytes

_CONTROL_GROUP = Path("/sys/fs/cgroup")
_FACTS = Path("/proc/meminfo")
_STATUS = Path("/proc/self/status")


def memory_of_a_rank(model: nn.Module, device: torch.device) -> float | None:
    """Return the smallest memory that any rank may hold; all ranks of the default group call it together.

    On a GPU this is its memory minus a margin. On the CPU it is the host's available memory plus the model's
    own size, since a pipeline's rank frees the parts that it does not need. Ranks on one device share its
    memory evenly, on a GPU after the contexts of all but the first.

    Args:
        model: The model to train, as this rank has it.
        device: The device that it trains on.

    Returns:
        The bytes; None if this system does not say.
    """
    told = [_here(model, device)]
    if dist.is_initialized():
        told = all_gather_value(told[0])
    sharing = Counter(place for place, _, _ in told)
    context = _CONTEXT if device.type == "cuda" else 0
    limits = [
        None if free is None else (free + context) / sharing[place] - context + held
        for place, free, held in told
    ]
    known = [limit for limit in limits if limit is not None]
    return min(known) if len(known) == len(limits) else None


def limit_logits(model: Transformer, plan: Plan, device: torch.device) -> None:
    """Let a Transformer make its logits in parts if they are many, where its Plan has them whole."""
    if plan.tp > 1:
        return
    _, memory, _ = _here(model, device)
    if memory is None or plan.has_halves:
        model.most_logits = None
    else:
        model.most_logits = int(memory * _OF_LOGITS / _FP32)


def _here(model: nn.Module, device: torch.device) -> tuple[str, float | None, int]:
    """Return this rank's device, the memory that the ranks on it share, and the bytes of the model."""
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        # Not the GPU's index: a launcher may show each rank only one GPU.
        return str(gpu.uuid), gpu.total_memory * (1 - _MARGIN), 0
    held = sum(each.nbytes for each in (*model.parameters(), *model.buffers()) if each.device == device)
    return platform.node(), available_memory() if device.type == "cpu" else None, held


def memory_of_steps() -> tuple[int, int]:
    """Return the most bytes that this process has held, and how many of them its next step may take again."""
    try:
        facts = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
        most, now = (int(facts[name].split()[0]) << 10 for name in ("VmHWM", "VmRSS"))
    except (OSError, KeyError, ValueError):
        return 0, 0
    return most, max(0, most - now)


def available_memory() -> int | None:
    """Return the bytes that new allocations can have on this host, within this process's control group."""
    try:
        facts = dict(line.split(":", 1) for line in _FACTS.read_text().splitlines())
        free = int(facts["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError):
        return None
    try:
        most = int((_CONTROL_GROUP / "memory.max").read_text())  # "max" where there is no limit
        taken = int((_CONTROL_GROUP / "memory.current").read_text())
        lines = (_CONTROL_GROUP / "memory.stat").read_text().splitlines()
        cached = int(dict(line.split() for line in lines)["inactive_file"])
    except (OSError, KeyError, ValueError):
        return free
    return min(free, max(0, most - taken + cached))
