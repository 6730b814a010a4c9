"""Reads the topology that NCCL, or RCCL, writes to NCCL_TOPO_DUMP_FILE.

It is XML: a <system> has the node's <cpu>s, and these have trees of <pci> switches and slots. A slot has a
<gpu> with its <nvlink>s (RCCL: <xgmi>), or a <nic> with its <net>s. A link's target is the bus address of a
device or of a switch; the speed of a <net> is in Mbit/s.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from shoal.cluster.tables import table
from shoal.cluster.topology import Interface, Topology, components, equal_lanes
from shoal.errors import ClusterError

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
