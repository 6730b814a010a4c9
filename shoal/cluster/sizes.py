"""Numbers of devices: how levels of links nest, and how they are cut to fewer devices or grow to more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shoal.cluster.checks import require
from shoal.cluster.level import Level
from shoal.errors import ClusterError


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
