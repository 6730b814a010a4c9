"""The Part: devices of one kind, in a Cluster whose devices differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from shoal.cluster.checks import require
from shoal.cluster.description import fields_of
from shoal.cluster.device import Device
from shoal.cluster.keys import Key


@dataclass(frozen=True, kw_only=True)
class Part:
    """Devices that are alike, in a Cluster whose devices are not. Ranks fill the parts in their order.

    Attributes:
        device: The device of this part; a file may leave it out where it is the Cluster's.
        devices: Number of devices of this part; a file may give its number of nodes as `nodes` instead.
        pace: Share of the usual rate at which these devices work: 0.9 for nodes that take 1/0.9 as long.
    """

    device: Annotated[Device, Key("table, or the name of a known device", '"a100-80"')]
    devices: Annotated[int, Key("devices; or write nodes = 4", "32")]
    pace: Annotated[float, Key("share of the usual rate", "0.9")] = 1.0

    def __post_init__(self) -> None:
        where = f"the part of {self.device.name}"
        require(self.devices >= 1, where, "devices", self.devices, "1 or more")
        require(
            0 < self.pace <= 1,
            where,
            "pace",
            self.pace,
            "a share of the usual rate, above 0 and at most 1, such as 0.9",
        )

    @property
    def title(self) -> str:
        """The name of the device, with its pace if that is not the usual one."""
        return self.device.name + ("" if self.pace == 1 else f" at {self.pace:g} of the usual rate")

    @property
    def at_pace(self) -> Device:
        """The device at the pace of this part."""
        return self.device if self.pace == 1 else self.device.slowed(1 / self.pace)

    def rate(self, precision: str) -> float:
        """Return the FLOP/s of products at this pace.

        Raises:
            ClusterError: The device's peak in this precision is not known.
        """
        return self.pace * self.device.flops(precision)


def first_devices(parts: Sequence[Part], devices: int) -> tuple[Part, ...]:
    """Return the parts of the first devices; the last one may be a part of a part."""
    found, left = list[Part](), devices
    for part in parts:
        if left > 0:
            found.append(replace(part, devices=min(left, part.devices)))
        left -= part.devices
    return tuple(found)


def slowest_device(parts: Sequence[Part], ranks: range, precision: str) -> Device:
    """Return the device that ranks wait for: the slowest one, at its pace, with the least memory of all.

    Args:
        parts: All parts, in order.
        ranks: Ranks, of which there is at least one, all of them in the parts.
        precision: Precision in which the devices' peaks are compared.

    Raises:
        ClusterError: A device's peak in this precision is not known.
    """
    used, begin = list[Part](), 0
    for part in parts:
        if any(begin <= rank < begin + part.devices for rank in (ranks[0], ranks[-1])) or (
            ranks[0] < begin and begin + part.devices <= ranks[-1]
        ):
            used.append(part)
        begin += part.devices
    slowest = min(used, key=lambda part: part.rate(precision))
    return replace(slowest.at_pace, memory=min(part.device.memory for part in used))


def device_described(described: str | Mapping[str, Any], where: str) -> Device:
    """Return the device that a file names, as in the tables of known ones, or describes.

    Args:
        described: The name, or a table of the device's fields.
        where: The object that the text describes, for messages.

    Raises:
        ClusterError: The name is not known, or a field is wrong.
    """
    return (
        Device.preset(described)
        if isinstance(described, str)
        else Device(**fields_of(Device, described, where))
    )


def part_described(described: Mapping[str, Any], usual: Device, node: int, where: str) -> Part:
    """Return the part that a table of a file describes.

    Args:
        described: The fields of the part; it may have `nodes` instead of `devices`.
        usual: Device of the part, if the table has none.
        node: Number of devices in a node.
        where: The object that the table describes, for messages.

    Raises:
        ClusterError: A field is wrong.
    """
    said = dict(described)
    if "nodes" in said and "devices" not in said:
        nodes = said.pop("nodes")
        require(type(nodes) is int and nodes >= 1, where, "nodes", nodes, "a whole number, 1 or more")
        said["devices"] = nodes * node
    values = fields_of(Part, {"device": usual.name} | said, where)
    if "device" in said:
        device = device_described(said["device"], f"the device of {where}")
    else:
        device = usual
    return Part(**values | {"device": device})
