"""Facts that a machine reports without being measured: its devices and its network adapters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.machine.probe.place import Place

_SYS = Path("/sys/class")
_BITS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Sheet:
    """Facts about a machine, known before any measurement.

    Attributes:
        device: Name of the device, as the driver gives it.
        memory: Bytes of one device.
        units: Multiprocessors of a device, or the threads that a rank computes with.
        on_cores: Whether devices are cores.
        devices: Number of devices on all hosts.
        devices_per_host: Number of devices on each host.
        cores: Number of cores that the ranks of a host share.
        inside: Name of the links inside a host.
        network: Bytes/s that a host's adapters carry for each device, one way; 0 if they do not report it.
        rdma: Names of adapters that can do RDMA.
        source: Source of the figures.
    """

    device: str
    memory: float
    units: int
    on_cores: bool
    devices: int
    devices_per_host: int
    cores: int
    inside: str
    network: float
    rdma: tuple[str, ...]
    source: str


def read_sheet(place: Place) -> Sheet:
    """Read the facts of the machine that this rank runs on."""
    on_cores = place.device.type == "cpu"
    if on_cores:
        units = torch.get_num_threads()
    else:
        units = torch.cuda.get_device_properties(place.device).multi_processor_count
    return Sheet(
        device=place.device_name,
        memory=place.memory,
        units=units,
        on_cores=on_cores,
        devices=place.ranks.count,
        devices_per_host=place.ranks_per_host,
        cores=place.cores,
        inside="memory" if on_cores else "scale-up",
        network=network_rate(_SYS) / place.ranks_per_host,
        rdma=rdma_adapters(_SYS),
        source=f"shoal probe, {place.ranks.count} ranks on {len(place.hosts)} "
        f"{'host' if len(place.hosts) == 1 else 'hosts'}, backend {place.backend}, torch {torch.__version__}",
    )


def network_rate(classes: Path) -> float:
    """Return the bytes/s that the adapters of a host carry together, one way; 0 if none reports it.

    If any adapters can do RDMA, only these count: the others then serve storage and management.

    Args:
        classes: The directory in which Linux lists devices by class: /sys/class.
    """
    rdma = [_number(file, r"(\d+) Gb/sec") * 1e9 for file in classes.glob("infiniband/*/ports/*/rate")]
    if any(rdma):
        return sum(rdma) / _BITS
    return sum(_number(file, r"(\d+)") * 1e6 for file in _wired(classes)) / _BITS


def rdma_adapters(classes: Path) -> tuple[str, ...]:
    """Return the names of the adapters that can do RDMA; `classes` is as for `network_rate`."""
    return tuple(sorted(each.name for each in classes.glob("infiniband/*")))


def _wired(classes: Path) -> Iterator[Path]:
    """Yield the speed files of network interfaces that have hardware behind them."""
    for interface in classes.glob("net/*"):
        if (interface / "device").exists():
            yield interface / "speed"


def _number(file: Path, pattern: str) -> float:
    try:
        text = file.read_text(encoding="ascii").strip()
    except OSError:  # an interface that is down has no speed
        return 0.0
    match = re.fullmatch(pattern + r".*", text)
    return float(match[1]) if match else 0.0
