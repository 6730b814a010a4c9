"""The bytes that a rank may hold: one number for all ranks, which cut a model alike."""

from __future__ import annotations

import platform
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from shoal.collectives.values import all_gather_value
from shoal.models import Transformer
from shoal.plan import Plan

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
