"""Stand-ins of rows, to try the acceptance run without a GPU: one that is right, one for each failure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from gpu_outcome import Found, Lacking, Row, Short

__all__ = ["SIMULATED"]

_SECTION = "Stand-ins"


def right(device: object) -> Iterator[str | Found]:
    """Find two things."""
    yield "a sentence"
    yield Found("a figure", {"ms": 1.5})


def wrong(device: object) -> str:
    """Find a wrong result."""
    raise AssertionError("given 3, wanted 4")


def short(device: object) -> Iterator[Found]:
    """Miss a target."""
    yield Found("a figure that misses its target", {"ms": 30.0})
    raise Short("30.0 ms, target 24 ms")


def raises(device: object) -> Iterator[str]:
    """Find something, then fail."""
    yield "found before the failure"
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def device_memory(device: object) -> str:
    """Fail as torch does where the device's memory is full."""
    raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")


def lacks(device: object) -> str:
    """Find that the native core is not there."""
    raise Lacking("the native core is not built, and there is no C++ compiler")


def killed(device: object) -> str:
    """End as a process does that touched memory which is not its own."""
    os.kill(os.getpid(), signal.SIGSEGV)
    return "never"


def exits(device: object) -> str:
    """End without a result."""
    os._exit(3)


def hangs(device: object) -> Iterator[str]:
    """Find something, then hang, and with it a child in a session of its own, both deaf to SIGTERM."""
    yield "found before the hang"
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    yield f"child {child.pid}"
    time.sleep(600)


def leaves(device: object) -> str:
    """Be right, and leave a child behind."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    return f"child {child.pid}"


def takes_all(device: object) -> str:
    """Take memory without end."""
    taken = []
    while True:
        taken.append(b"\1" * (16 << 20))
        time.sleep(0.02)


SIMULATED = (
    Row("right", _SECTION, 20, "gpu_simulated:right"),
    Row("wrong", _SECTION, 20, "gpu_simulated:wrong"),
    Row("short", _SECTION, 20, "gpu_simulated:short"),
    Row("raises", _SECTION, 20, "gpu_simulated:raises"),
    Row("hangs", _SECTION, 3, "gpu_simulated:hangs"),
    Row("takes-all", _SECTION, 20, "gpu_simulated:takes_all"),
    Row("device-memory", _SECTION, 20, "gpu_simulated:device_memory"),
    Row("killed", _SECTION, 20, "gpu_simulated:killed"),
    Row("exits", _SECTION, 20, "gpu_simulated:exits"),
    Row("leaves", _SECTION, 20, "gpu_simulated:leaves"),
    Row("lacks", _SECTION, 20, "gpu_simulated:lacks"),
    Row("an-extra", _SECTION, 20, "gpu_simulated:right", needs=("no_such_package",)),
    Row("too-long", _SECTION, 3600, "gpu_simulated:right"),
    Row("after-all", "More stand-ins", 20, "gpu_simulated:right"),
)
