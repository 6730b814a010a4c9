"""Memory of the host: pressure, what is free, /dev/shm and huge pages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from shoal.machine.doctor.machine import Finding, Machine, Verdict, Window, number, ports
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


_LEFT, _LITTLE = 1 << 30, 0.05  # bytes; share


def check_disk(folders: Sequence[str]) -> Callable[[Machine, Window], Iterator[Finding]]:
    """Return a check of the space of the file systems that hold some folders."""

    def check(machine: Machine, window: Window) -> Iterator[Finding]:
        for folder in folders:
            space = machine.space(folder)
            if space is None or not space.total:
                continue
            told = f"{format_bytes(space.free)} of {format_bytes(space.total)} free"
            if space.free < _LEFT:
                yield Finding(f"disk of {folder}", Verdict.BAD, told, "make room: a checkpoint would not fit")
            elif space.free < _LITTLE * space.total:
                yield Finding(f"disk of {folder}", Verdict.WARN, told, "make room before the next checkpoint")
            else:
                yield Finding(f"disk of {folder}", Verdict.OK, told)

    return check


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


_TICKS = 100.0  # per second, in /proc
_BUSY = 0.95  # share of a core's time
_CROWDED = 0.9  # share of all cores' time
_STOLEN = 0.02
_NEIGHBOUR = 0.5  # cores


def check_cores(machine: Machine, window: Window) -> Iterator[Finding]:
    """Judge how busy each core is, and whether a hypervisor takes its time."""
    row = "cores"
    shares, stolen = {}, {}
    for core in window.owners("core"):
        busy, idle, taken = (window.growth("core", core, name) for name in ("busy", "idle", "stolen"))
        if total := busy + idle + taken:
            shares[core], stolen[core] = busy / total, taken / total
    if not shares:
        return
    mean, full = sum(shares.values()) / len(shares), [core for core, share in shares.items() if share > _BUSY]
    worst_stolen = max(stolen.values())
    told = f"{mean:.0%} busy over {len(shares)} cores" + (f"; full: {', '.join(full[:8])}" if full else "")
    if worst_stolen > _STOLEN:
        yield Finding(
            row,
            Verdict.BAD,
            f"a hypervisor takes {worst_stolen:.0%} of a core's time",
            "other virtual machines share the cores: ask for cores of your own",
        )
    if mean > _CROWDED:
        yield Finding(row, Verdict.WARN, told, "use fewer ranks, loader workers or threads (OMP_NUM_THREADS)")
    elif len(full) == 1 and len(shares) > 2:
        yield Finding(
            row,
            Verdict.WARN,
            told,
            "one thread is full while others idle: a rank's loop, or interrupts of a card",
        )
    else:
        yield Finding(row, Verdict.OK, told)


def check_neighbours(machine: Machine, window: Window) -> Iterator[Finding]:
    """Name the processes that use most, of those that are not ranks of Shoal or Python programs."""
    row = "other processes"
    if not window.seconds or not window.owners("process"):
        return
    used = {
        owner: window.growth("process", owner, "busy") / _TICKS / window.seconds
        for owner in window.owners("process")
    }
    ours = ("shoal", "python", "pt_main_thread", "pt_data_worker")
    others = {
        owner: cores
        for owner, cores in used.items()
        if cores >= _NEIGHBOUR and not owner.partition(" ")[2].startswith(ours)
    }
    told = ", ".join(
        f"{owner.partition(' ')[2]} (process {owner.partition(' ')[0]}) {cores:.1f} cores"
        + _on_core(machine, owner.partition(" ")[0])
        for owner, cores in sorted(others.items(), key=lambda pair: -pair[1])[:4]
    )
    if others:
        yield Finding(row, Verdict.WARN, told, "stop it, or keep its cores and the ranks' cores apart")
    else:
        yield Finding(row, Verdict.OK, "none uses half a core")


def check_governor(machine: Machine, window: Window) -> Iterator[Finding]:
    """Judge the frequency governor of the cores."""
    root = "/sys/devices/system/cpu"
    governor = (machine.read(f"{root}/cpu0/cpufreq/scaling_governor") or "").strip()
    if governor == "powersave" and not machine.exists(f"{root}/intel_pstate"):
        yield Finding(
            "core clocks", Verdict.WARN, "the governor is powersave", "cpupower frequency-set -g performance"
        )
    elif governor:
        yield Finding("core clocks", Verdict.OK, f"the governor is {governor}")


def _on_core(machine: Machine, pid: str) -> str:
    """Return on which core a process last ran, as the end of a sentence."""
    fields = (machine.read(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
    return f", last on core {fields[36]}" if len(fields) > 36 else ""
