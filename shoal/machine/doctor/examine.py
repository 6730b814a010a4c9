"""Examines a machine: all checks in one visible order."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self, final

from shoal.machine.doctor import gpu, memory, nccl
from shoal.machine.doctor.machine import Finding, Machine, Verdict, Window
from shoal.machine.doctor.memory import check_disk

Check = Callable[[Machine, Window], Iterator[Finding]]

_FILES_ONLY: tuple[Check, ...] = (
    nccl.check_settings,
    nccl.check_ports,
    nccl.check_speed,
    nccl.check_mtu,
    gpu.check_nodes,
    memory.check_governor,
    memory.check_cgroup,
    memory.check_ulimits,
    memory.check_memory,
    memory.check_shared_memory,
    memory.check_huge_pages,
)
"""Checks that run no command and compare no two moments."""

_OTHERS: tuple[Check, ...] = (
    nccl.check_traffic,
    nccl.check_rails,
    nccl.check_errors,
    nccl.check_congestion,
    nccl.check_pauses,
    nccl.check_drops,
    gpu.check_gpus,
    gpu.check_xid,
    gpu.check_matrix,
    memory.check_cores,
    memory.check_neighbours,
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


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class HostReport:
    """The findings of one host.

    Attributes:
        host: Name of the host.
        when: Time of the examination, in seconds since the epoch.
        findings: The findings.
        interfaces: MTU and speed of the network interfaces that were up.
    """

    host: str
    when: float
    findings: Sequence[Finding]
    interfaces: Mapping[str, Mapping[str, int]]

    def write(self, folder: Path) -> None:
        """Write the report into a folder, in place of an older one of this host."""
        folder.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^\w.-]", "_", self.host)
        (folder / f"{name}.json").write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read_all(cls, folder: Path) -> list[Self]:
        """Return the reports in a folder, by host; a file that is torn or is no report is left out."""
        return [found for path in sorted(folder.glob("*.json")) if (found := cls._read(path)) is not None]

    @classmethod
    def _read(cls, path: Path) -> Self | None:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            rows = [
                Finding(str(each["row"]), Verdict(each["verdict"]), str(each["found"]), str(each["change"]))
                for each in data["findings"]
            ]
            interfaces = {
                str(name): {str(key): int(value) for key, value in values.items()}
                for name, values in data["interfaces"].items()
            }
            return cls(host=str(data["host"]), when=float(data["when"]), findings=rows, interfaces=interfaces)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None


def across_hosts(reports: Sequence[HostReport]) -> list[Finding]:
    """Return findings about what differs between hosts: MTU and speed of interfaces of one name."""
    findings = []
    for quantity, row, change in (
        (
            "mtu",
            "MTU across hosts",
            "set one MTU on all hosts and switches: large packets are lost otherwise",
        ),
        ("speed", "link speed across hosts", "the slowest host sets the pace: look at its cable and port"),
    ):
        hosts_by_value: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        for report in reports:
            for interface, values in report.interfaces.items():
                hosts_by_value[interface][values.get(quantity, 0)].append(report.host)
        for interface, found in hosts_by_value.items():
            if len(found) > 1:
                told = "; ".join(
                    f"{value} on {', '.join(hosts[:4])}" for value, hosts in sorted(found.items())
                )
                findings.append(Finding(row, Verdict.BAD, f"{interface}: {told}", change))
    return findings
