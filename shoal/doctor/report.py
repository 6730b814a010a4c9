"""The findings of one host of a run, as a file of the run, and what differs between hosts."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self, final

from shoal.doctor.finding import Finding, Verdict


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
