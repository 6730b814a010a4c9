"""Examines a machine: all checks in one visible order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from shoal.doctor import ethernet, gpu, infiniband, limits, memory, nccl, placement, processor
from shoal.doctor.disk import check_disk
from shoal.doctor.finding import Finding
from shoal.doctor.machine import Machine
from shoal.doctor.window import Window

Check = Callable[[Machine, Window], Iterator[Finding]]

_FILES_ONLY: tuple[Check, ...] = (
    nccl.check_settings,
    infiniband.check_ports,
    ethernet.check_speed,
    ethernet.check_mtu,
    placement.check_nodes,
    processor.check_governor,
    limits.check_cgroup,
    limits.check_ulimits,
    memory.check_memory,
    memory.check_shared_memory,
    memory.check_huge_pages,
)
"""Checks that run no command and compare no two moments."""

_OTHERS: tuple[Check, ...] = (
    nccl.check_traffic,
    infiniband.check_rails,
    infiniband.check_errors,
    infiniband.check_congestion,
    ethernet.check_pauses,
    ethernet.check_drops,
    gpu.check_gpus,
    gpu.check_xid,
    placement.check_matrix,
    processor.check_cores,
    processor.check_neighbours,
)


def examine(
    machine: Machine, window: Window, *, log: str | None = None, folders: Sequence[str] = (".",)
) -> list[Finding]:
    """Return all findings about a machine.

    Args:
        machine: The machine.
        window: Its counters at one or two moments.
        log: NCCL's own log; None if there is none.
        folders: Folders whose file systems must have space.
    """
    findings = list(nccl.check_log(machine, log)) if log is not None else []
    for check in (*_OTHERS[:1], *_FILES_ONLY, *_OTHERS[1:], check_disk(folders)):
        findings += check(machine, window)
    return findings


def examine_quickly(machine: Machine, folders: Sequence[str]) -> list[Finding]:
    """Return the findings that need no command and no second moment, in some milliseconds."""
    window = Window({}, {}, 0.0)
    return [finding for check in (*_FILES_ONLY, check_disk(folders)) for finding in check(machine, window)]
