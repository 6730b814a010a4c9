"""Facts about the machine, without which figures of collectives say little."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from shoal.collectives.core import load_core
from shoal.units import format_bytes, format_seconds

_COPY_BYTES = 256 << 20  # well beyond any cache
_COPIES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The machine that the bench ran on.

    Attributes:
        cpu: Model of the processor.
        cores: Number of cores that this process may use.
        memory: Bytes of memory.
        load: Load average of the last minute, before the measurement.
        python: Version of Python.
        torch: Version of torch.
        flag_seconds: Seconds for a flag in shared memory to get from one core to another, one way; None if it
            cannot be measured. On virtual machines it changes up to ten times with the placement of the
            cores, and the time of small messages with it.
        copy_rate: Bytes a second that one core copies from memory to memory.
    """

    cpu: str
    cores: int
    memory: int
    load: float
    python: str
    torch: str
    flag_seconds: float | None
    copy_rate: float

    def __str__(self) -> str:
        cores = "1 core" if self.cores == 1 else f"{self.cores} cores"
        flag = "not measured" if self.flag_seconds is None else format_seconds(self.flag_seconds)
        return (
            f"{self.cpu}, {cores}, {format_bytes(self.memory)}; "
            f"load average before {self.load:.2f}\n"
            f"a flag from core to core, one way: {flag}; one core copies {self.copy_rate / 1e9:.1f} GB/s\n"
            f"Python {self.python}, torch {self.torch}"
        )


def describe() -> Machine:
    """Return the facts about this machine; measures for about half a second, on this core alone."""
    load = os.getloadavg()[0]
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        load=load,
        python=platform.python_version(),
        torch=torch.__version__,
        flag_seconds=flag_latency(),
        copy_rate=copy_rate(),
    )


def flag_latency() -> float | None:
    """Return the seconds for a flag in shared memory to get from one core to another, one way.

    The native core measures it. None if the native core is not built, or there is one CPU core only.
    """
    core, cores = load_core(), sorted(os.sched_getaffinity(0))
    if core is None or len(cores) < 2:
        return None
    nanoseconds: float = core.flag_latency(cores[0], cores[1])
    return nanoseconds * 1e-9 if nanoseconds >= 0 else None


def copy_rate() -> float:
    """Return the bytes a second that this core copies from memory to memory: the median of a few copies."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    seconds = []
    for _ in range(_COPIES):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return _COPY_BYTES / median(seconds)


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
