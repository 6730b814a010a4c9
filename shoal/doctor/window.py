"""Counters at two moments: what moved, waited or was used between them.

A counter has a name such as `("port", "mlx5_0/1", "port_xmit_data")`: kind, owner, counter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shoal.doctor.machine import Machine, number

Counter = tuple[str, str, str]

_NET = "/sys/class/net"
_RDMA = "/sys/class/infiniband"


@dataclass(frozen=True)
class Window:
    """Counters of a machine before and after some seconds.

    Attributes:
        before: Counters at the first moment.
        after: Counters at the second moment.
        seconds: Seconds between them; 0 if there was no second moment.
    """

    before: Mapping[Counter, int]
    after: Mapping[Counter, int]
    seconds: float

    def growth(self, kind: str, owner: str, counter: str) -> int:
        """Return by how much a counter grew; 0 if it was not there twice, or was reset."""
        key = kind, owner, counter
        return max(0, self.after.get(key, 0) - self.before.get(key, 0)) if key in self.before else 0

    def rate(self, kind: str, owner: str, counter: str) -> float:
        """Return the growth of a counter per second; 0 if there was no second moment."""
        return self.growth(kind, owner, counter) / self.seconds if self.seconds else 0.0

    def growths(self, kind: str, owner: str) -> dict[str, int]:
        """Return the growth of all counters of an owner, without those that stood still."""
        names = (name for found, whose, name in self.before if (found, whose) == (kind, owner))
        return {name: grown for name in names if (grown := self.growth(kind, owner, name))}

    def owners(self, kind: str) -> list[str]:
        """Return the owners of counters of a kind, sorted."""
        return sorted({owner for found, owner, _ in self.after if found == kind})


def count(machine: Machine) -> dict[Counter, int]:
    """Return all counters of a machine."""
    return dict(
        [*_ports(machine), *_interfaces(machine), *_ethtool(machine), *_cores(machine), *_processes(machine)]
    )


def ports(machine: Machine) -> list[tuple[str, str]]:
    """Return the RDMA ports: device and port, such as ("mlx5_0", "1")."""
    return [
        (device, port) for device in machine.names(_RDMA) for port in machine.names(f"{_RDMA}/{device}/ports")
    ]


def interfaces(machine: Machine) -> list[str]:
    """Return the network interfaces of hardware: not loopback, bridges or virtual pairs."""
    return [each for each in machine.names(_NET) if machine.exists(f"{_NET}/{each}/device")]


def devices(machine: Machine, vendor: str, classes: tuple[str, ...]) -> list[str]:
    """Return the addresses of PCI devices of a vendor and some classes, such as "0000:19:00.0"."""
    root = "/sys/bus/pci/devices"
    return [
        address
        for address in machine.names(root)
        if (machine.read(f"{root}/{address}/vendor") or "").strip() == vendor
        and (machine.read(f"{root}/{address}/class") or "").startswith(classes)
    ]


def _ports(machine: Machine) -> Iterable[tuple[Counter, int]]:
    for device, port in ports(machine):
        for folder in ("counters", "hw_counters"):
            path = f"{_RDMA}/{device}/ports/{port}/{folder}"
            for name in machine.names(path):
                if (value := number(machine.read(f"{path}/{name}"))) is not None:
                    yield ("port", f"{device}/{port}", name), value


def _interfaces(machine: Machine) -> Iterable[tuple[Counter, int]]:
    for each in interfaces(machine):
        path = f"{_NET}/{each}/statistics"
        for name in machine.names(path):
            if (value := number(machine.read(f"{path}/{name}"))) is not None:
                yield ("interface", each, name), value


def _ethtool(machine: Machine) -> Iterable[tuple[Counter, int]]:
    for each in interfaces(machine):
        for line in (machine.run("ethtool", "-S", each) or "").splitlines():
            name, _, text = line.strip().rpartition(":")
            if name and (value := number(text)) is not None:
                yield ("ethtool", each, name.strip()), value


def _cores(machine: Machine) -> Iterable[tuple[Counter, int]]:
    """Ticks of each core: busy, idle and stolen by a hypervisor."""
    for line in (machine.read("/proc/stat") or "").splitlines():
        name, *words = line.split()
        if name.startswith("cpu") and name[3:].isdecimal() and len(words) >= 8:
            user, nice, system, idle, waiting, interrupts, soft, stolen = map(int, words[:8])
            yield ("core", name[3:], "busy"), user + nice + system + interrupts + soft
            yield ("core", name[3:], "idle"), idle + waiting
            yield ("core", name[3:], "stolen"), stolen


def _processes(machine: Machine) -> Iterable[tuple[Counter, int]]:
    """Ticks that each process used, in user and system mode; the owner is "PID NAME"."""
    for pid in machine.names("/proc"):
        if not pid.isdecimal() or (stat := machine.read(f"/proc/{pid}/stat")) is None:
            continue
        opening, closing = stat.find("("), stat.rfind(")")
        fields = stat[closing + 1 :].split()
        if opening >= 0 and len(fields) > 12:
            yield (
                ("process", f"{pid} {stat[opening + 1 : closing]}", "busy"),
                int(fields[11]) + int(fields[12]),
            )
