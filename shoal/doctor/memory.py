"""Memory of the host: pressure, what is free, /dev/shm and huge pages."""

from __future__ import annotations

import re
from collections.abc import Iterator

from shoal.doctor.finding import Finding, Verdict
from shoal.doctor.machine import Machine
from shoal.doctor.window import Window
from shoal.units import format_bytes

_STALLED = 1.0  # per cent of ten seconds in which all tasks waited for memory
_FREE = 0.05
_SHARED = 1 << 30  # bytes


def check_memory(machine: Machine, window: Window) -> Iterator[Finding]:
    """Judge the free memory, and the pressure of memory that the kernel measures (PSI)."""
    row = "memory"
    fields = _fields(machine)
    total, free = fields.get("MemTotal", 0), fields.get("MemAvailable", 0)
    if not total:
        return
    pressure = machine.read("/proc/pressure/memory")
    match = re.search(r"full avg10=([\d.]+)", pressure or "")
    stalled = float(match[1]) if match else 0.0
    told = f"{format_bytes(free)} of {format_bytes(total)} available"
    if pressure is not None:
        told += f", all tasks waited for memory {stalled:g} % of the last 10 s"
    swapped = fields.get("SwapTotal", 0) - fields.get("SwapFree", 0)
    if stalled > _STALLED:
        yield Finding(row, Verdict.BAD, told, "the host pages: use fewer ranks, workers or a smaller cache")
    elif free < _FREE * total:
        yield Finding(row, Verdict.WARN, told, "the kernel kills a rank when it is full")
    elif swapped > _FREE * total:
        yield Finding(row, Verdict.WARN, f"{told}; {format_bytes(swapped)} swapped out", "turn swap off")
    else:
        yield Finding(row, Verdict.OK, told)


def check_shared_memory(machine: Machine, window: Window) -> Iterator[Finding]:
    """Judge the size of /dev/shm, through which loader workers pass tensors."""
    space = machine.space("/dev/shm")
    if space is None:
        yield Finding("/dev/shm", Verdict.WARN, "it is not there", "loader workers need it: mount a tmpfs")
    elif space.total < _SHARED or space.free < _FREE * space.total:
        yield Finding(
            "/dev/shm",
            Verdict.WARN,
            f"{format_bytes(space.free)} of {format_bytes(space.total)} free",
            "loader workers and NCCL need it: docker run --shm-size=8g",
        )
    else:
        yield Finding(
            "/dev/shm", Verdict.OK, f"{format_bytes(space.free)} of {format_bytes(space.total)} free"
        )


def check_huge_pages(machine: Machine, window: Window) -> Iterator[Finding]:
    """Tell whether large allocations get huge pages."""
    row = "huge pages"
    setting = machine.read("/sys/kernel/mm/transparent_hugepage/enabled")
    match = re.search(r"\[(\w+)\]", setting or "")
    if match is None:
        return
    reserved = _fields(machine).get("Hugetlb", 0)
    told = f"transparent: {match[1]}" + (f"; {format_bytes(reserved)} reserved" if reserved else "")
    if reserved > _fields(machine).get("MemTotal", 0) / 2:
        yield Finding(
            row, Verdict.WARN, told, "more than half of the memory is reserved: lower vm.nr_hugepages"
        )
    elif match[1] == "never":
        yield Finding(
            row,
            Verdict.WARN,
            told,
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled: pages of 4 KiB cost time",
        )
    else:
        yield Finding(row, Verdict.OK, told)


def _fields(machine: Machine) -> dict[str, int]:
    """Return the fields of /proc/meminfo in bytes."""
    found = re.findall(r"^(\w+):\s+(\d+) kB", machine.read("/proc/meminfo") or "", re.MULTILINE)
    return {name: int(value) << 10 for name, value in found}
