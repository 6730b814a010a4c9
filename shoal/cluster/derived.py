"""What follows from a Cluster's figures: totals, and rates of whole nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.cluster.cluster import Cluster
from shoal.cluster.money import dollars, kilowatt_hours
from shoal.cluster.part import Part

_HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """Totals of the devices that Plans use. A value is None where a figure it needs is not known.

    Attributes:
        devices: Number of devices that Plans use.
        nodes: Number of their nodes; the last may be a part of one.
        paid: Number of devices that are paid for: these, and those of spare nodes.
        memory: Bytes of memory of a device that programs get.
        memory_of_all: Bytes of memory of all devices together.
        peak: FLOP/s by precision of all devices together, at their pace.
        network: Bytes/s out of a node with all of its devices sending, in one direction; None for one level.
        network_reached: Bytes/s of these that large collectives reach, oversubscription included.
        between_failures: Seconds from one failure of any device to the next.
        dollars: Dollars for an hour, on demand.
        kilowatts: Power under load, with the nodes and the building.
    """

    devices: int
    nodes: int
    paid: int
    memory: float
    memory_of_all: float
    peak: dict[str, float]
    network: float | None
    network_reached: float | None
    between_failures: float | None
    dollars: float | None
    kilowatts: float | None


def derived(cluster: Cluster) -> Derived:
    """Return what follows from a Cluster's figures."""
    node, devices = cluster.devices_per_node, cluster.devices
    parts = cluster.parts or (Part(device=cluster.device, devices=devices),)
    kinds = [(part.device, part.devices, part.pace) for part in parts]
    outside = cluster.levels[-1] if len(cluster.levels) > 1 else None
    everywhere = [each for each in cluster.device.peak if all(each in kind[0].peak for kind in kinds)]
    return Derived(
        devices=devices,
        nodes=math.ceil(devices / node),
        paid=devices + cluster.spare * node,
        memory=min(device.memory for device, _, _ in kinds) - cluster.reserved,
        memory_of_all=sum(count * device.memory for device, count, _ in kinds),
        peak={
            each: sum(count * pace * device.peak[each] for device, count, pace in kinds)
            for each in everywhere
        },
        network=outside.bandwidth * node if outside else None,
        network_reached=outside.rate(2) * node if outside else None,
        between_failures=_HOUR / (cluster.failures * devices) if cluster.failures else None,
        dollars=dollars(cluster, _HOUR) if cluster.price else None,
        kilowatts=kilowatt_hours(cluster, _HOUR) if cluster.power.device else None,
    )
