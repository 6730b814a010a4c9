"""Limits: ulimits of the process, and quotas and throttling of its cgroup."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.doctor.finding import Finding, Verdict
from shoal.doctor.machine import Machine, number
from shoal.doctor.window import Window, ports
from shoal.units import format_bytes

_FILES = 65_536
_THROTTLED = 0.01  # share of periods
_FULL = 0.9  # share of the memory's limit


def check_ulimits(machine: Machine, window: Window) -> Iterator[Finding]:
    """Judge how much memory may be locked, which RDMA needs, and how many files may be open."""
    limits = {}
    for line in (machine.read("/proc/self/limits") or "").splitlines()[1:]:
        limits[line[:26].strip()] = line[26:].split()[:1]
    locked = (limits.get("Max locked memory") or ["unlimited"])[0]
    files = (limits.get("Max open files") or ["unlimited"])[0]
    if not limits:
        return
    if locked != "unlimited" and ports(machine):
        yield Finding(
            "locked memory",
            Verdict.BAD,
            f"limited to {format_bytes(int(locked))}, and RDMA must lock its buffers",
            "ulimit -l unlimited; in a container: --ulimit memlock=-1",
        )
    else:
        yield Finding(
            "locked memory", Verdict.OK, "unlimited" if locked == "unlimited" else "no RDMA needs it"
        )
    if files != "unlimited" and int(files) < _FILES:
        yield Finding("open files", Verdict.WARN, f"at most {files}", f"ulimit -n {_FILES}")
    else:
        yield Finding("open files", Verdict.OK, f"at most {files}")


def check_cgroup(machine: Machine, window: Window) -> Iterator[Finding]:
    """Judge the quota of cores, its throttling, and the limit of memory of this process's cgroup (v2)."""
    line = next(
        (each for each in (machine.read("/proc/self/cgroup") or "").splitlines() if each.startswith("0::")),
        "",
    )
    folder = "/sys/fs/cgroup" + line.removeprefix("0::").rstrip("/")
    if not machine.exists(f"{folder}/cgroup.controllers"):
        return
    quota, _, period = (machine.read(f"{folder}/cpu.max") or "max").strip().partition(" ")
    fields = dict(
        each.split()
        for each in (machine.read(f"{folder}/cpu.stat") or "").splitlines()
        if len(each.split()) == 2
    )
    periods, throttled = (number(fields.get(name)) or 0 for name in ("nr_periods", "nr_throttled"))
    if quota.isdecimal() and period.isdecimal():
        told = f"at most {int(quota) / int(period):g} cores, throttled in {throttled} of {periods} periods"
        is_slow = periods and throttled / periods > _THROTTLED
        yield Finding(
            "cgroup cores",
            Verdict.BAD if is_slow else Verdict.OK,
            told,
            "raise the quota, or use fewer threads and loader workers" if is_slow else "",
        )
    most, now = (number(machine.read(f"{folder}/{name}")) for name in ("memory.max", "memory.current"))
    if most:
        share = (now or 0) / most
        yield Finding(
            "cgroup memory",
            Verdict.WARN if share > _FULL else Verdict.OK,
            f"{format_bytes(now or 0)} of {format_bytes(most)}",
            "the kernel kills a rank when this is full: raise the limit" if share > _FULL else "",
        )
