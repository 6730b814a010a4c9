"""How many bytes a rank may hold: the same number on all ranks, which cut a model alike."""

from __future__ import annotations

import platform
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["memory_of_a_rank"]

_MARGIN = 0.1
"""Share of a GPU's memory that is left to CUDA itself, to NCCL's buffers and to gaps between tensors."""

_CONTROL_GROUP = Path("/sys/fs/cgroup")
_FACTS = Path("/proc/meminfo")


def memory_of_a_rank(model: nn.Module, device: torch.device) -> float | None:
    """The least that any rank may hold; all ranks of the default process group call it together.

    On a GPU that is its memory less a margin. On the CPU it is what the host has available, and what the
    model takes already, since a pipeline's rank frees what it does not need. Ranks on one device share it
    evenly.

    Args:
        model: What is to be trained, as this rank has it.
        device: Where.

    Returns:
        None if this system does not tell.
    """
    told = [_here(model, device)]
    if dist.is_initialized():
        told *= dist.get_world_size()
        dist.all_gather_object(told, told[0])
    sharing = Counter(place for place, _, _ in told)
    limits = [None if free is None else free / sharing[place] + held for place, free, held in told]
    known = [limit for limit in limits if limit is not None]
    return min(known) if len(known) == len(limits) else None


def _here(model: nn.Module, device: torch.device) -> tuple[str, float | None, int]:
    """Which device of all it is, what the ranks there may have of it together, and what the model has."""
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        # Not its number: a launcher may show each rank one GPU alone.
        return str(gpu.uuid), gpu.total_memory * (1 - _MARGIN), 0
    held = sum(each.nbytes for each in (*model.parameters(), *model.buffers()) if each.device == device)
    return platform.node(), _available() if device.type == "cpu" else None, held


def _available() -> int | None:
    """Bytes that new allocations can have on this host, within the limit of this process's control group."""
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
