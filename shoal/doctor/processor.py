"""Cores: is one fully busy, does a neighbour take them, does a hypervisor steal them, are they slowed?"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.doctor.finding import Finding, Verdict
from shoal.doctor.machine import Machine
from shoal.doctor.window import Window

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
