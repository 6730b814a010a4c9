"""A Cluster whose devices differ, seen as uniform ones: as if every device were of one of its kinds.

Costs, memory and the planner know uniform Clusters. They take a view for each kind of device, and combine
these by the devices that a stage sits on (`shoal.cost.kinds`). All views have the Cluster's links.
"""

from __future__ import annotations

from shoal.cluster.cluster import Cluster
from shoal.cluster.device import Device


def devices_of(cluster: Cluster) -> tuple[Device, ...]:
    """Return the different devices of a Cluster, each at the pace of its part, in the order of ranks."""
    if not cluster.parts:
        return (cluster.device,)
    return tuple(dict.fromkeys(part.at_pace for part in cluster.parts))


def counts_of(cluster: Cluster) -> dict[str, int]:
    """Return the number of devices of each kind, by title, in the order of `devices_of`."""
    if not cluster.parts:
        return {cluster.device.name: cluster.devices}
    found: dict[str, int] = {}
    for number, device in enumerate(devices_of(cluster), 1):
        alike = [part for part in cluster.parts if part.at_pace == device]
        title = alike[0].title
        found[title if title not in found else f"{title} (kind {number})"] = sum(
            each.devices for each in alike
        )
    return found


def every_device(cluster: Cluster, device: Device) -> Cluster:
    """Return the Cluster as if every device were this one."""
    return cluster.replace(device=device, parts=())


def peak_of_all(cluster: Cluster, precision: str) -> float:
    """Return the FLOP/s of all devices together by their data sheets; a slow node counts in full.

    Raises:
        ClusterError: A device's peak in this precision is not known.
    """
    if not cluster.parts:
        return cluster.device.flops(precision) * cluster.devices
    return sum(part.device.flops(precision) * part.devices for part in cluster.parts)
