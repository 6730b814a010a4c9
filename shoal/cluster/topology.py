"""A node's Topology, as tools show it, and the Cluster that follows from it.

A tool says how many devices a node has, which links join them, and its network interfaces. The tables give
the rest, by the device and by the type of the links: shares that programs reach, latencies, the host, power.
`notes` says what was taken for granted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.cluster.cluster import Cluster
from shoal.cluster.device import Device
from shoal.cluster.level import Level
from shoal.cluster.tables import matching, table
from shoal.errors import ClusterError, nearest

_GIGABIT = 1e9 / 8


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface.

    Attributes:
        name: Name that the driver gives, such as "mlx5_0".
        rate: Bytes/s in one direction; 0 if the tool does not say.
    """

    name: str
    rate: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The devices, links and interfaces of one node.

    Attributes:
        device: Key of the device in the tables; "" if the tool does not say which it is.
        devices: Number of devices.
        joined: Number of devices that direct links join, in each group of them; 1 if there are none.
        lanes: Number of direct links of one device.
        mesh: Whether these lead from device to device, rather than to a switch.
        slot: Bytes/s of a device's slot in one direction; 0 if the tool does not say.
        interfaces: Network interfaces that are near the devices.
        notes: Sentences about what the tool did not say, and what was left out.
    """

    device: str
    devices: int
    joined: int
    lanes: int
    mesh: bool
    slot: float = 0.0
    interfaces: tuple[Interface, ...] = ()
    notes: tuple[str, ...] = field(default=())


def device_key(words: str) -> str:
    """Return the key of a device in the tables, by its key or by a driver's name.

    Raises:
        ClusterError: There is no such device.
    """
    devices = table("devices")
    found = words if words in devices else matching("devices", words)
    if found is None:
        raise ClusterError(
            f"{words!r} is not a known device{nearest(words.lower(), devices)}",
            possible=", ".join(devices),
            change="give one of these names to --device",
        )
    return found


def lanes_of(device: str) -> Mapping[str, Any] | None:
    """Return rate, greatest number and type of a known device's direct links; None if it has none."""
    return next((each for each in table("interfaces")["lanes"].values() if device in each["of"]), None)


def components(devices: int, pairs: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Return the devices in groups that pairs of links join, directly or through others."""
    group = list(range(devices))
    for one, other in pairs:
        kept, gone = sorted((group[one], group[other]))
        group = [kept if each == gone else each for each in group]
    return [[i for i in range(devices) if group[i] == first] for first in sorted(set(group))]


def equal_lanes(lanes: Sequence[int], groups: Sequence[Sequence[int]], where: str) -> tuple[int, int]:
    """Return the size of each group, and the links of each device, which must be equal.

    Raises:
        ClusterError: Devices or groups differ: a link is broken, or the text is torn.
    """
    sizes = {len(group) for group in groups}
    if len(set(lanes)) > 1 or len(sizes) > 1:
        told = ", ".join(f"device {number}: {count}" for number, count in enumerate(lanes))
        raise ClusterError(
            f"the devices of {where} do not have equal links ({told}; groups of {sorted(sizes)})",
            possible="devices with as many links each, in groups of one size",
            change="import from a node whose links all work, or edit a file of `shoal cluster export`",
        )
    return sizes.pop(), lanes[0]


def cluster_of(
    topology: Topology, *, name: str, device: str | None = None, interface_rate: float | None = None
) -> tuple[Cluster, list[str]]:
    """Return the Cluster of one such node, and notes on what was taken for granted.

    Args:
        topology: The node.
        name: Name of the Cluster.
        device: Device, by its key or a driver's name; by default the one that the tool told.
        interface_rate: Bytes/s of one interface; by default what the tool told, or what is usual.

    Raises:
        ClusterError: The device is not told, not known, or has not as many links.
    """
    key = device_key(device) if device else topology.device
    if not key:
        raise ClusterError(
            "the topology does not say which device the node has",
            possible=", ".join(table("devices")),
            change="give one of these names to --device",
        )
    usual = Cluster.assemble(key, topology.devices, topology.devices, None)
    notes = list(topology.notes)
    levels = [*_inner_levels(topology, key, notes)]
    levels += _network(topology, key, interface_rate, notes)
    notes.append("host, power, failures and reserved memory are those of the device's usual node")
    return Cluster(
        name=name,
        device=Device.preset(key),
        levels=tuple(levels),
        failures=usual.failures,
        reserved=usual.reserved,
        power=usual.power,
        host=replace(usual.host, devices=topology.devices) if usual.host.devices > 2 else usual.host,
        source="imported from a topology; rates by data sheets, shares and latencies by links.toml",
    ), notes


def _inner_levels(topology: Topology, key: str, notes: list[str]) -> list[Level]:
    """Return the direct links and the slots that join the devices of a node."""
    levels = []
    if topology.joined > 1:
        lanes = lanes_of(key)
        if lanes is None or topology.lanes > lanes["most"]:
            raise ClusterError(
                f"the topology has {topology.lanes} direct links for each device, and a {key} has "
                f"{lanes['most'] if lanes else 'none that is known'}",
                possible="a device with as many links",
                change="correct --device, or edit a file of `shoal cluster export`",
            )
        link = table("links")[lanes["link"]]
        rest = {"mesh": topology.mesh, "reduces": link.get("reduces", False) and not topology.mesh}
        levels.append(
            Level(
                name="nvlink" if "nvlink" in lanes["link"] else "infinity-fabric",
                devices=topology.joined,
                bandwidth=topology.lanes * lanes["rate"],
                **link | rest,
            )
        )
    if topology.joined < topology.devices or topology.devices == 1:
        usual = next((each for each in _usual_levels(key) if each["link"].startswith("pcie")), None)
        rate = topology.slot or (usual["bandwidth"] if usual else 0.0) or Device.preset(key).host_bandwidth
        if not topology.slot:
            notes.append(
                f"the rate of a slot is not told: {rate / 1e9:g} GB/s, which is usual for the device"
            )
        link = table("links")[usual["link"] if usual else "pcie"]
        levels.append(Level(name="pcie", devices=topology.devices, bandwidth=rate, **link))
    return levels


def _network(topology: Topology, key: str, interface_rate: float | None, notes: list[str]) -> list[Level]:
    """Return the network out of the node, if it has one."""
    count = len(topology.interfaces)
    if not count:
        notes.append("no network interface is told, so that the file describes a single node")
        return []
    usual = _usual_levels(key)[-1]
    if interface_rate is not None:
        rate = count * interface_rate / topology.devices
    else:
        rate = sum(each.rate for each in topology.interfaces) / topology.devices
    if not rate:
        rate = usual["bandwidth"]
        notes.append(
            f"the rate of an interface is not told: {rate / _GIGABIT:g} Gbit/s for each device, which is "
            "usual; say it with --nic-gbits"
        )
    names = ", ".join(each.name for each in topology.interfaces)
    notes.append(f"{count} network interfaces count, those nearest to the devices: {names}")
    networks = table("interfaces")["networks"]
    kind = next((networks[start] for start in networks if names.startswith(start)), "infiniband")
    if kind.startswith("efa") and usual["link"].startswith("efa"):
        kind = usual["link"]
    link = table("links")[kind]
    return [Level(name="network", devices=topology.devices, bandwidth=rate, **link)]


def _usual_levels(key: str) -> list[Mapping[str, Any]]:
    """Return the links of the first known node with a device."""
    found: list[Mapping[str, Any]] = next(
        node["levels"] for node in table("nodes").values() if node["device"] == key
    )
    return found
