"""Dollars and kilowatt hours of devices that work for some seconds.

Spare nodes are paid for, and idle, so that they cost dollars and are not counted in energy; failed nodes cost
nothing. What a long run costs with interruptions follows from its goodput:
`goodput(priced(cluster, "spot"), step, save, restart).dollars(tokens, tokens_per_step)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.errors import ClusterError, nearest
from shoal.spec.cluster.cluster import Cluster
from shoal.spec.cluster.device import Part
from shoal.spec.cluster.prices import KINDS_OF_PRICE

_HOUR = 3600.0
_KILO = 1000.0


def price_of(cluster: Cluster, kind: str) -> float:
    """Return the dollars of one device and hour.

    Args:
        cluster: The machines.
        kind: "on-demand", "reserved" or "spot".

    Raises:
        ClusterError: There is no such kind, or its price is not known.
    """
    prices = {
        "on-demand": cluster.price,
        "reserved": cluster.prices.reserved,
        "spot": cluster.prices.spot,
    }
    if kind not in prices:
        raise ClusterError(
            f"{kind!r} is not a kind of price{nearest(kind, KINDS_OF_PRICE)}",
            possible=", ".join(KINDS_OF_PRICE),
            change="use one of these",
        )
    if not prices[kind]:
        key = "price" if kind == "on-demand" else f"prices.{kind}"
        known = ", ".join(f"{name} (${price:g})" for name, price in prices.items() if price)
        raise ClusterError(
            f"{cluster.name} has no price {kind}",
            possible=known or "none is known",
            change=f"write {key}, in dollars for one device and hour, into the file of the Cluster",
        )
    return prices[kind]


def priced(cluster: Cluster, kind: str) -> Cluster:
    """Return the Cluster at one kind of price; spot devices are interrupted beside their failures.

    Raises:
        ClusterError: There is no such kind, or its price is not known.
    """
    failures = cluster.failures + (cluster.prices.interruptions if kind == "spot" else 0.0)
    return cluster.replace(price=price_of(cluster, kind), failures=failures)


def dollars(
    cluster: Cluster, seconds: float, *, devices: int | None = None, kind: str = "on-demand"
) -> float:
    """Return the cost of devices for some seconds.

    Args:
        cluster: The machines.
        seconds: Seconds for which they are paid.
        devices: Number of devices; by default all that Plans use, and the spare ones.
        kind: "on-demand", "reserved" or "spot".

    Raises:
        ClusterError: There is no such kind, or its price is not known.
    """
    paid = cluster.devices + cluster.spare * cluster.devices_per_node if devices is None else devices
    return price_of(cluster, kind) * paid * seconds / _HOUR


def kilowatt_hours(cluster: Cluster, seconds: float, *, devices: int | None = None) -> float:
    """Return the energy of devices that work for some seconds, with their nodes and the building.

    Args:
        cluster: The machines.
        seconds: Seconds for which they work.
        devices: Number of devices; by default all that Plans use.

    Raises:
        ClusterError: The power of a device is not known.
    """
    if not cluster.power.device:
        raise ClusterError(
            f"{cluster.name} does not say what power a device draws",
            possible="[power] with device, overhead (watts) and pue",
            change="write power.device, such as 700, into the file of the Cluster",
        )
    working = cluster.devices if devices is None else devices
    return cluster.power.watts * working * seconds / _HOUR / _KILO


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
