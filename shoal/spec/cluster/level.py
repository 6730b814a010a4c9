"""The Level: links that join devices into groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from shoal.errors import ClusterError
from shoal.spec.cluster.tables import SHARE, Key, require, require_bytes, require_share


@dataclass(frozen=True, kw_only=True)
class Level:
    """Links that join devices into groups, and these into larger ones, such as a node's switch or a fabric.

    `setup`, `packet_limit` and `copy_rate` belong to the device: only those of the innermost level count.

    Attributes:
        name: Name, such as "nvlink" or "network".
        devices: Number of devices in one full group of this level.
        bandwidth: Bytes/s from one device, by its data sheet; in a mesh over all of its links together.
        share: Share of the bandwidth that large collectives reach.
        exchange_share: Share of the bandwidth that large all_to_alls reach; 0 if it is `share`.
        setup: Seconds that a collective takes to begin and end, however few take part.
        latency: Seconds that a step from device to device takes.
        slices: Number of parts of a step's bytes that a device passes on one by one, so that it receives one
            while it sends another. The latency is hidden if the other slices take longer.
        packet_latency: Seconds that a step takes if each word of the data carries a flag that says it has
            come, so that no one waits for the whole buffer; 0 if the library has no such protocol.
        packet_share: Share of the bandwidth that data in such packets reach.
        packet_limit: Most bytes of a step that the library sends in packets, if few steps follow one another;
            0 if there is no limit.
        half_size: Bytes s0 in the time `(S/B)(1 + sqrt(s0/S))` of S bytes: small buffers are slower by it.
        copy_rate: Bytes/s at which a device copies its own part of a buffer; 0 if that takes no time.
        peers: Number of messages of an all_to_all that a device has under way at once.
        oversubscription: How many times more the devices can send than the level's links carry together. It
            slows only the bytes that leave a group of the level inside.
        mesh: Whether each device has a link to each other one, rather than all of its bandwidth to any.
        chain: Whether trees pass the devices one after another, as those of NCCL do in a node.
        rails: Whether these links join only devices of equal place in their nodes. Other bytes pass the links
            inside a node first, or the next level.
        reduces: Whether the switches add up: an all-reduce then sends each byte up once.
        reduction_start: Further seconds that these all-reduces take.
        reduction_share: Share of the bandwidth that these all-reduces reach.
        source: Where these figures come from.
    """

    name: Annotated[str, Key("text", '"nvlink"')]
    devices: Annotated[int, Key("devices", "8")]
    bandwidth: Annotated[float, Key("bytes/s of a device, in one direction; 400 Gbit/s are 50e9", "50e9")]
    share: Annotated[float, Key(SHARE, "0.9")] = 0.8
    exchange_share: Annotated[float, Key(SHARE, "0.8")] = 0.0
    setup: Annotated[float, Key("s", "20e-6")] = 0.0
    latency: Annotated[float, Key("s", "14e-6")] = 10e-6
    slices: Annotated[int, Key("parts of a step's bytes", "2")] = 1
    packet_latency: Annotated[float, Key("s", "2e-6")] = 0.0
    packet_share: Annotated[float, Key(SHARE, "0.25")] = 0.25
    packet_limit: Annotated[float, Key("bytes", "1e6")] = 0.0
    half_size: Annotated[float, Key("bytes", "2.5e6")] = 0.0
    copy_rate: Annotated[float, Key("bytes/s", "1e12")] = 0.0
    peers: Annotated[int, Key("messages at once", "8")] = 1
    oversubscription: Annotated[float, Key("times, 1 or more", "2.0")] = 1.0
    mesh: Annotated[bool, Key("true or false", "false")] = False
    chain: Annotated[bool, Key("true or false", "false")] = False
    rails: Annotated[bool, Key("true or false", "true")] = False
    reduces: Annotated[bool, Key("true or false", "true")] = False
    reduction_start: Annotated[float, Key("s", "4e-6")] = 0.0
    reduction_share: Annotated[float, Key(SHARE, "0.7")] = 0.7
    source: Annotated[str, Key("text", '"the switches\' data sheet"')] = ""

    def __post_init__(self) -> None:
        where = f"the level {self.name}"
        require_bytes(where, bandwidth=self.bandwidth)
        if self.copy_rate:
            require_bytes(where, copy_rate=self.copy_rate)
        for name in ("devices", "slices", "peers"):
            require(getattr(self, name) >= 1, where, name, getattr(self, name), "1 or more")
        for name in ("share", "packet_share", "reduction_share"):
            require_share(where, name, getattr(self, name))
        if self.exchange_share:
            require_share(where, "exchange_share", self.exchange_share)
        for name in ("setup", "latency", "packet_latency", "reduction_start"):
            value = getattr(self, name)
            require(0 <= value < 1, where, name, value, "seconds: 0 or more, and far below 1, such as 5e-6")
        for name in ("half_size", "packet_limit"):
            require(getattr(self, name) >= 0, where, name, getattr(self, name), "bytes, 0 or more")
        require(
            self.oversubscription >= 1,
            where,
            "oversubscription",
            self.oversubscription,
            "1 if links carry all that devices send, 2 if they carry half of it",
        )

    def rate(self, members: int) -> float:
        """Return the bytes/s from each device that collectives of `members` devices reach.

        In a mesh a collective uses the links that lead to other members.
        """
        reached = self.bandwidth * self.share / self.oversubscription
        if self.mesh and members < self.devices:
            return reached * max(members - 1, 1) / (self.devices - 1)
        return reached


def require_nested(name: str, levels: Sequence[Level]) -> None:
    """Check that full groups of a level are made of full groups of the level inside it.

    The last level has all devices: whole nodes, of which the last pod or rack may have fewer than the others.

    Raises:
        ClusterError: There are no levels, or their groups do not nest.
    """
    if not levels:
        raise ClusterError(
            f"{name} has no levels of links",
            possible="one or more; the last joins all devices",
            change="add a level, with devices=1 for a single device",
        )
    node, everything = levels[0].devices, levels[-1].devices
    inner = node
    for level in levels:
        unit = node if level.devices == everything else inner
        if level.devices < inner or level.devices % unit:
            raise ClusterError(
                f"the level {level.name} of {name} joins {level.devices} devices, and the level inside it "
                f"joins {inner}",
                possible=f"a multiple of {unit}, {inner} or more",
                change="correct the number of devices of one of them",
            )
        inner = level.devices


def resized(name: str, levels: Sequence[Level], devices: int, *, beside: int = 0) -> tuple[Level, ...]:
    """Return the levels of so many devices: part of one node, or whole nodes.

    Args:
        name: Name of the machines, for messages.
        levels: Levels, innermost first.
        devices: Number of devices that are used.
        beside: Number of nodes beside these that are not used.

    Raises:
        ClusterError: The number is neither part of one node nor whole nodes.
    """
    require(devices >= 1, name, "devices", devices, "1 or more")
    node = levels[0]
    if len(levels) > 1 and devices > node.devices and devices % node.devices:
        below = devices - devices % node.devices
        raise ClusterError(
            f"{devices} devices are not a multiple of the {node.devices} that {node.name} joins in {name}",
            possible=f"up to {node.devices}, or a multiple of it, such as {below} or {below + node.devices}",
            change="ask for another number of devices",
        )
    everything = devices + beside * node.devices
    return tuple(
        cut(level, everything if level is levels[-1] else min(everything, level.devices)) for level in levels
    )


def cut(level: Level, devices: int) -> Level:
    """Return a level with so many devices; a mesh loses the links to the devices that are gone."""
    if not level.mesh or devices >= level.devices:
        return replace(level, devices=devices)
    left = max(devices - 1, 1) / (level.devices - 1)
    return replace(level, devices=devices, bandwidth=level.bandwidth * left)


def whole_groups(devices: int, board: int, most: int) -> int:
    """Return the number of devices in each innermost group, so that groups are equal and of whole boards."""
    sizes = [size for size in range(board, most + 1, board) if devices % size == 0]
    return min(max(sizes, default=board), max(devices, board))
