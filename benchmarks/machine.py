"""The facts about this machine that a figure needs beside it.

python benchmarks/machine.py
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from statistics import median

import numpy as np
import torch

from shoal.units import format_bytes, format_seconds

__all__ = ["Machine", "describe"]

_COPY_BYTES = 256 << 20  # well beyond any cache
_COPIES = 7


@dataclass(frozen=True, slots=True)
class Machine:
    """What was measured on.

    Attributes:
        cpu: Model of the processor.
        cores: How many this process may use.
        memory: Bytes.
        load: Load average of the last minute, before anything was measured.
        python: Version.
        torch: Version; its gloo has no version of its own.
        flag_seconds: Time for a flag in shared memory to get from one core to another, one way; None where
            there is no C compiler, or one core only.
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
        flag = "not measured" if self.flag_seconds is None else format_seconds(self.flag_seconds)
        return (
            f"{self.cpu}, {self.cores} cores, {format_bytes(self.memory)}; "
            f"load average before {self.load:.2f}\n"
            f"Python {self.python}, torch {self.torch} and the gloo in it\n"
            f"a flag from core to core, one way: {flag}; one core copies {self.copy_rate / 1e9:.1f} GB/s"
        )


def describe() -> Machine:
    """Measures for about a second."""
    load = os.getloadavg()[0]
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        load=load,
        python=platform.python_version(),
        torch=torch.__version__,
        flag_seconds=_flag_seconds(),
        copy_rate=_copy_rate(),
    )


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _flag_seconds() -> float | None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    compiler = which("cc")
    if compiler is None or len(cores) < 2:
        return None
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "flag_latency"
        source = Path(__file__).with_name("flag_latency.c")
        command = [str(program), *(str(core) for core in cores)]
        try:
            subprocess.run([compiler, "-O2", "-o", program, source], check=True)
            answer = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        except subprocess.SubprocessError as error:
            print(f"the latency of a flag cannot be measured: {error}", file=sys.stderr)
            return None
    return float(answer.stdout) * 1e-9


def _copy_rate() -> float:
    source = np.ones(_COPY_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    seconds = []
    for _ in range(_COPIES):
        start = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - start)
    return _COPY_BYTES / median(seconds)


if __name__ == "__main__":
    print(describe())
