"""Dollars and kilowatt hours of devices that work for some seconds.

Spare nodes are paid for, and idle, so that they cost dollars and are not counted in energy; failed nodes cost
nothing. What a long run costs with interruptions follows from its goodput:
`goodput(priced(cluster, "spot"), step, save, restart).dollars(tokens, tokens_per_step)`.
"""

from __future__ import annotations

from shoal.cluster.cluster import Cluster
from shoal.cluster.prices import KINDS_OF_PRICE
from shoal.errors import ClusterError, nearest

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
