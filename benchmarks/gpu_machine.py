"""The row of the machine: versions, limits, and what is missing."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from gpu_outcome import Found
from gpu_sources import CORE_FAILURE

from shoal.collectives import is_built
from shoal.units import format_bytes

__all__ = ["facts"]

_EXTRAS = ("triton", "transformers", "torchao", "peft", "pytest", "hypothesis", "shtab")
_SMI = "driver_version,clocks.max.sm,power.limit,temperature.gpu,clocks_throttle_reasons.active,memory.used"


def facts(device: torch.device) -> Iterator[Found]:
    """Versions, the driver's state, the limits of memory that can be locked and shared, missing extras."""
    if device.type == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        yield Found(f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, NCCL {nccl}")
        command = ["nvidia-smi", f"--query-gpu={_SMI}", "--format=csv,noheader"]
        if shutil.which(command[0]):
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
            yield Found(f"{_SMI}: {done.stdout.strip()}")
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    locked = "no limit" if limit == resource.RLIM_INFINITY else format_bytes(limit)
    shared = os.statvfs("/dev/shm")
    memory = Path("/proc/meminfo").read_text().split(maxsplit=2)[1]
    yield Found(
        f"{len(os.sched_getaffinity(0))} cores, {format_bytes(int(memory) * 1024)} of memory, "
        f"locked at most: {locked}, /dev/shm {format_bytes(shared.f_blocks * shared.f_frsize)}"
    )
    core = "the native core is built"
    yield Found(core if is_built() else os.environ.get(CORE_FAILURE, "the native core is not built"))
    found = {name: _version(name) for name in _EXTRAS}
    there = ", ".join(f"{name} {each}" for name, each in found.items() if each)
    missing = ", ".join(name for name, each in found.items() if not each)
    yield Found(f"extras: {there or 'none'}; not installed: {missing or 'none'}")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
