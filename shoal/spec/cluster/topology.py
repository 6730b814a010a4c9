"""A node's Topology, as tools show it, and the Cluster that follows from it.

A tool says how many devices a node has, which links join them, and its network interfaces. The tables give
the rest, by the device and by the type of the links: shares that programs reach, latencies, the host, power.
`notes` says what was taken for granted.

Reads the matrix that `nvidia-smi topo -m` prints.

Rows and columns are devices (GPU0, ...) and network interfaces (NIC0, ... or mlx5_0, ...). An entry says what
lies between two: NV# so many NVLinks; PIX, PXB one PCIe switch or several; PHB a CPU's bridge; NODE several
bridges of one CPU; SYS another CPU. The matrix has no rates, and names no device; if the output of
`nvidia-smi -L`, or of `nvidia-smi`, stands in the same file, that names it.

Reads the topology that NCCL, or RCCL, writes to NCCL_TOPO_DUMP_FILE.

It is XML: a <system> has the node's <cpu>s, and these have trees of <pci> switches and slots. A slot has a
<gpu> with its <nvlink>s (RCCL: <xgmi>), or a <nic> with its <net>s. A link's target is the bus address of a
device or of a switch; the speed of a <net> is in Mbit/s.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from shoal.errors import ClusterError, nearest
from shoal.spec.cluster.cluster import Cluster
from shoal.spec.cluster.device import Device
from shoal.spec.cluster.level import Level
from shoal.spec.cluster.tables import matching, table

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


_WAYS = ("PIX", "PXB", "PHB", "NODE", "SOC", "SYS")
"""Ways from near to far, beside NV#; SOC is what old drivers call SYS."""
_NEAR = ("PIX", "PXB")
_DEVICE = re.compile(r"GPU\d+")
_NAMED = re.compile(r"^GPU \d[\d,]*: (.+?)(?: \(UUID.*)?$|^\|\s+\d+\s+(NVIDIA .+?)\s{2,}", re.MULTILINE)
_INTERFACE = re.compile(r"^\s*(NIC\d+): (\S+)\s*$", re.MULTILINE)
_COLOURS = re.compile(r"\x1b\[[\d;]*m")


def is_matrix(text: str) -> bool:
    """Return whether a text has the head of such a matrix."""
    return _head(_COLOURS.sub("", text)) is not None


def read_matrix(text: str, where: str, device: str | None = None) -> Topology:
    """Return the node of a matrix.

    Args:
        text: What `nvidia-smi topo -m` printed; other lines may stand around it.
        where: Name of the file, for messages.
        device: The device, by key or driver's name, which tells direct links from a switch's.

    Raises:
        ClusterError: The matrix is torn, has entries that are not known, or its devices' links differ.
    """
    text = _COLOURS.sub("", text)
    rows = _rows(text, where)
    names = [name for name in rows if _DEVICE.fullmatch(name)]
    count = len(names)
    key = device_key(device) if device else _told_device(text)
    counts = [[_lanes(rows[one][other]) for other in names] for one in names]
    is_mesh, lanes, groups = _links_of_matrix(counts, key)
    joined, each = equal_lanes(lanes, groups, where)
    notes = []
    if any(group != list(range(group[0], group[0] + joined)) for group in groups):
        notes.append(f"linked devices are not neighbours: order them as {groups}")
    return Topology(
        device=key,
        devices=count,
        joined=joined if each else 1,
        lanes=each,
        mesh=is_mesh,
        interfaces=_interfaces_of_matrix(rows, names, dict(_INTERFACE.findall(text))),
        notes=tuple(notes),
    )


def _head(text: str) -> list[str] | None:
    """Return the columns of the matrix; None if there is no head."""
    for line in text.splitlines():
        words = line.partition("CPU Affinity")[0].split()
        if words[:1] == ["GPU0"] and not any(word == "X" for word in words):
            return words
    return None


def _rows(text: str, where: str) -> dict[str, dict[str, str]]:
    """Return the entry of each row and column.

    Raises:
        ClusterError: A row is missing, short, or has an entry that is not known.
    """
    columns = _head(text) or []
    rows: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        words = line.split()
        if words[:1] and words[0] in columns and "X" in words[1 : len(columns) + 1]:
            rows[words[0]] = dict(zip(columns, words[1:], strict=False))
    whole = "the whole output of: nvidia-smi topo -m"
    for name in columns:
        entries = rows.get(name, {})
        if name not in rows or len(entries) < len(columns):
            raise ClusterError(
                f"{where} has {'a short' if entries else 'no'} row of {name}, though it has a column of it",
                possible=whole,
                change="import the output again, without wrapped or missing lines",
            )
        for other, entry in entries.items():
            is_known = entry in _WAYS or re.fullmatch(r"NV\d+", entry)
            if entry != "X" if name == other else not is_known:
                raise ClusterError(
                    f"{where} has {entry!r} between {name} and {other}",
                    possible="X for itself, else NV and a number, " + ", ".join(_WAYS),
                    change=f"import {whole}",
                )
    for name, other in itertools.combinations(columns, 2):
        if rows[name][other] != rows[other][name]:
            raise ClusterError(
                f"{where} has {rows[name][other]!r} between {name} and {other}, and {rows[other][name]!r} "
                f"between {other} and {name}",
                possible="the same both ways",
                change=f"import {whole}",
            )
    return rows


def _told_device(text: str) -> str:
    """Return the device that the same file names; "" if it names none, or several."""
    names = {one or other for one, other in _NAMED.findall(text)}
    return (matching("devices", names.pop()) or "") if len(names) == 1 else ""


def _lanes(entry: str) -> int:
    return int(entry[2:]) if entry.startswith("NV") else 0


def _links_of_matrix(counts: Sequence[Sequence[int]], key: str) -> tuple[bool, list[int], list[list[int]]]:
    """Return whether links lead from device to device, how many each device has, and the groups they join.

    Behind a switch each pair of devices has all links of both; in a mesh they share them. So all pairs that
    have together more links than a device can have are behind a switch; of an unknown device, 18.
    """
    count = len(counts)
    pairs = [(one, other) for one in range(count) for other in range(one) if counts[one][other]]
    most = (lanes_of(key) or {"most": 18})["most"] if key else 18
    sums = [sum(row) for row in counts]
    groups = components(count, pairs)
    if count > 2 and max(sums) > most:
        return False, [max(row) for row in counts], groups
    return True, sums, groups


def _interfaces_of_matrix(
    rows: Mapping[str, Mapping[str, str]], devices: Sequence[str], names: Mapping[str, str]
) -> tuple[Interface, ...]:
    """Return the interfaces behind the switches of devices; where there are none, the nearest ones."""
    nearest = {
        each: min(_WAYS.index(entry) for other, entry in row.items() if other in devices)
        for each, row in rows.items()
        if each not in devices
    }
    most = max(len(_NEAR) - 1, min(nearest.values(), default=0))
    return tuple(Interface(names.get(each, each)) for each, way in nearest.items() if way <= most)


_MEGABIT = 1e6 / 8
_ENCODING = {2.5: 0.8, 5.0: 0.8}
"""Share of payload by GT/s of PCIe; 128/130 from the third generation on."""


def read_nccl(text: str, where: str) -> Topology:
    """Return the node of a dump.

    Args:
        text: The XML.
        where: Name of the file, for messages.

    Raises:
        ClusterError: The text is torn, or is not such a dump, or its devices do not have equal links.
    """
    system = _system(text, where)
    above = {child: parent for parent in system.iter() for child in parent}
    devices = sorted(system.iter("gpu"), key=lambda gpu: _number(gpu, "dev", where))
    if not devices:
        raise ClusterError(
            f"{where} has no <gpu>",
            possible="a dump of NCCL_TOPO_DUMP_FILE that a job with all devices of a node wrote",
            change="write the dump in a job that uses the devices",
        )
    slots = [above[gpu] for gpu in devices]
    places = {slot.get("busid", ""): number for number, slot in enumerate(slots)}
    pairs, lanes, to_switch = _links(devices, places, where)
    groups = [list(range(len(devices)))] if to_switch else components(len(devices), pairs)
    joined, count = equal_lanes(lanes, groups, where)
    notes = []
    if any(group != list(range(group[0], group[0] + joined)) for group in groups):
        notes.append(f"linked devices are not neighbours: order them as {groups}")
    hosts = {cpu.get("host_hash") for cpu in system.iter("cpu")}
    if len(hosts) > 1:
        notes.append(f"the dump is of {len(hosts)} hosts, whose devices count as one node")
    return Topology(
        device=_device(slots, where),
        devices=len(devices),
        joined=joined if count else 1,
        lanes=count,
        mesh=not to_switch,
        slot=min(map(_slot_rate, slots)),
        interfaces=_interfaces(system, slots, above, where),
        notes=tuple(notes),
    )


def _system(text: str, where: str) -> Element:
    try:
        system = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ClusterError(
            f"{where} is not whole XML: {error}",
            possible="a whole dump of NCCL_TOPO_DUMP_FILE",
            change="let the job end before the file is copied, and import it again",
        ) from None
    if system.tag != "system":
        graph = "; NCCL_GRAPH_DUMP_FILE writes <graphs>" if system.tag == "graphs" else ""
        raise ClusterError(
            f"{where} has <{system.tag}> where a topology has <system>{graph}",
            possible="a dump of NCCL_TOPO_DUMP_FILE",
            change="set NCCL_TOPO_DUMP_FILE in a job, and import what it wrote",
        )
    return system


def _links(
    devices: Sequence[Element], places: Mapping[str, int], where: str
) -> tuple[list[tuple[int, int]], list[int], bool]:
    """Return the pairs of devices with direct links, the links of each, and whether they lead to switches."""
    pairs, lanes, to_switch = list[tuple[int, int]](), [0] * len(devices), False
    for number, gpu in enumerate(devices):
        for link in (each for each in gpu if each.tag in ("nvlink", "xgmi")):
            other = places.get(link.get("target", ""))
            lanes[number] += _number(link, "count", where)
            if other is None:
                to_switch = True
            else:
                pairs.append((number, other))
    return pairs, lanes, to_switch


def _device(slots: Sequence[Element], where: str) -> str:
    """Return the key of the device that all slots have; "" if it is not known.

    Raises:
        ClusterError: The devices differ.
    """
    told = {(slot.get("vendor", ""), slot.get("device", "")) for slot in slots}
    if len(told) > 1:
        raise ClusterError(
            f"{where} has devices of several kinds: {sorted(told)}",
            possible="devices of one kind",
            change="describe such a node by hand: shoal cluster export, and [[parts]]",
        )
    words = ":".join(part.removeprefix("0x") for part in told.pop()).lower()
    return next((key for key, known in table("interfaces")["pci"].items() if words in known), "")


def _slot_rate(slot: Element) -> float:
    """Return the bytes/s of a slot in one direction; 0 if the dump does not say."""
    found = re.match(r"(\d+(?:\.\d+)?) GT/s", slot.get("link_speed", ""))
    width = slot.get("link_width", "")
    if not found or not width.isdecimal():
        return 0.0
    transfers = float(found[1])
    return transfers * 1e9 / 8 * int(width) * _ENCODING.get(transfers, 128 / 130)


def _interfaces(
    system: Element, slots: Sequence[Element], above: Mapping[Element, Element], where: str
) -> tuple[Interface, ...]:
    """Return the interfaces behind the switches of devices, or else all; without much slower ones."""
    found: dict[str, tuple[Interface, bool]] = {}
    near = {_trunk(slot, above) for slot in slots}
    for net in system.iter("net"):
        name = net.get("name", "")
        rate = _number(net, "speed", where) * _MEGABIT
        found.setdefault(f"{name}:{net.get('port')}", (Interface(name, rate), _trunk(net, above) in near))
    used = [interface for interface, is_near in found.values() if is_near]
    used = used or [interface for interface, _ in found.values()]
    fastest = max((each.rate for each in used), default=0.0)
    return tuple(each for each in used if each.rate * 2 >= fastest)


def _trunk(element: Element, above: Mapping[Element, Element]) -> Element:
    """Return the part of the tree, directly below a <cpu>, that an element is in."""
    while above[element].tag not in ("cpu", "system"):
        element = above[element]
    return element


def _number(element: Element, name: str, where: str) -> int:
    try:
        return int(element.get(name, ""))
    except ValueError:
        raise ClusterError(
            f"{where} has <{element.tag}> with {name}={element.get(name)!r}",
            possible="a whole number",
            change="import a dump as NCCL wrote it",
        ) from None


_POSSIBLE = "XML that NCCL_TOPO_DUMP_FILE names, or the output of: nvidia-smi topo -m"


def read_topology(path: Path, device: str | None = None) -> Topology:
    """Return the node that a file shows.

    Args:
        path: The file.
        device: The device, by key or driver's name, if it is known.

    Raises:
        ClusterError: The file cannot be read, or is of no known tool, torn, or contradicts itself.
    """
    try:
        text = path.read_text("utf-8-sig")
    except OSError as error:
        raise ClusterError(
            f"the topology {path} cannot be read: {error.strerror}",
            possible=_POSSIBLE,
            change="correct the path",
        ) from None
    except ValueError:
        raise ClusterError(
            f"{path} is not text", possible=_POSSIBLE, change="import a file of one of these"
        ) from None
    if text.lstrip().startswith("<"):
        return read_nccl(text, str(path))
    if is_matrix(text):
        return read_matrix(text, str(path), device)
    raise ClusterError(
        f"{path} is not a topology: it is no XML, and has no line of columns that begins with GPU0",
        possible=_POSSIBLE,
        change="import a file of one of these",
    )
