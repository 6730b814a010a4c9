"""Warnings of figures in a Cluster that are possible and unlikely, such as a rate in bits instead of bytes.

Impossible figures are refused when the Cluster is made. The limits here are about twice those of the largest
machines in the tables. A known device is also compared with its data sheet.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.spec.cluster.cluster import Cluster
from shoal.spec.cluster.device import Device, known_device
from shoal.spec.cluster.level import Level

_MOST_OUTSIDE = 200e9
"""Bytes/s from a device out of its node, beyond any network interface of 2025 (800 Gbit/s are 100e9)."""
_MOST_LINK = 4e12
_MOST_MEMORY_RATE = 20e12
_MOST_MEMORY = 600e9
_MOST_PEAK = 40e15
_MOST_LATENCY = 1e-3
_MOST_HOST_SECONDS = 1e-3
_LEAST_SHARE = 0.2
_MOST_PRICE = 50.0
_MOST_FAILURES = 1e-2
_MOST_JITTER = 0.3
_MOST_WATTS = 3000.0
_APART = 1.3
"""Factor between a figure and the data sheet of a known device from which on they are not one device."""


def implausible(cluster: Cluster) -> list[str]:
    """Return a sentence for each figure that is likely to be wrong, with what may have been meant."""
    kinds = {cluster.device: "the device", **{part.device: "a part's device" for part in cluster.parts}}
    return [
        *(f"{told} {each}" for device, told in kinds.items() for each in _of_device(device)),
        *_of_levels(cluster.levels),
        *_of_cluster(cluster),
    ]


def _of_device(device: Device) -> Iterator[str]:
    for name, value, most in (
        ("bandwidth", device.bandwidth, _MOST_MEMORY_RATE),
        ("memory", device.memory, _MOST_MEMORY),
        *((f"peak.{precision}", rate, _MOST_PEAK) for precision, rate in device.peak.items()),
    ):
        if value > most:
            yield f"has {name}={value:g}: more than any device has; write bytes, bytes/s and FLOP/s, not bits"
    for name in ("launch", "dispatch", "graph"):
        if (value := getattr(device, name)) > _MOST_HOST_SECONDS:
            yield f"has {name}={value:g} s, which is long; write microseconds as {value * 1e6:g}e-6"
    for name in ("product_share", "bandwidth_share"):
        if (value := getattr(device, name)) < _LEAST_SHARE:
            yield f"has {name}={value:g}: programs reach less than a fifth of the data sheet's rate"
    if device.peak.get("fp32", 0.0) > device.peak.get("bf16", float("inf")):
        yield "has a higher peak in fp32 than in bf16: were they exchanged?"
    known = known_device(device.name)
    if known is not None:
        yield from _unlike(device, known)


def _unlike(device: Device, known: Device) -> Iterator[str]:
    """Compare with a data sheet's figures, as far as there are any."""
    figures = {"memory": (device.memory, known.memory), "bandwidth": (device.bandwidth, known.bandwidth)}
    for precision in device.peak.keys() & known.peak.keys():
        figures[f"peak.{precision}"] = device.peak[precision], known.peak[precision]
    for name, (given, sheet) in sorted(figures.items()):
        if not 1 / _APART <= given / sheet <= _APART:
            sparse = (
                " (with sparsity? peaks are dense)" if 1.9 < given / sheet < 2.1 and "peak" in name else ""
            )
            yield f"has {name}={given:g}, and a {known.name} has {sheet:g}{sparse}"


def _of_levels(levels: tuple[Level, ...]) -> Iterator[str]:
    for number, level in enumerate(levels):
        where = f"the level {level.name}"
        is_network = number > 0 and level is levels[-1]
        if level.bandwidth > (_MOST_OUTSIDE if is_network else _MOST_LINK):
            yield (
                f"{where} has bandwidth={level.bandwidth:g} bytes/s for each device, which is too much: "
                f"{level.bandwidth / 1e9:g} Gbit/s are {level.bandwidth / 8:g}"
            )
        elif number and level.bandwidth > levels[number - 1].bandwidth:
            yield (
                f"{where} has bandwidth={level.bandwidth:g}, more than the level inside it has; give the "
                "rate of one device, not of a node"
            )
        if level.latency > _MOST_LATENCY or level.setup > _MOST_LATENCY:
            name, value = max(("latency", level.latency), ("setup", level.setup), key=lambda each: each[1])
            yield f"{where} has {name}={value:g} s, which is long; write microseconds as {value * 1e6:g}e-6"
        if level.share < _LEAST_SHARE:
            yield f"{where} has share={level.share:g}: collectives reach less than a fifth of its bandwidth"
        if level.oversubscription > 16:
            yield f"{where} has oversubscription={level.oversubscription:g}; 7 stands for 7 : 1"


def _of_cluster(cluster: Cluster) -> Iterator[str]:
    node, memory = cluster.devices_per_node, cluster.device.memory
    if cluster.price > _MOST_PRICE:
        yield f"price={cluster.price:g} dollars an hour is much for one device: a node's price / {node}?"
    if cluster.failures > _MOST_FAILURES:
        yield f"failures={cluster.failures:g}: each device fails every {1 / cluster.failures:.3g} hours"
    if cluster.jitter > _MOST_JITTER:
        yield f"jitter={cluster.jitter:g} is much; 2 % are 0.02"
    if cluster.reserved > memory / 4:
        yield f"reserved={cluster.reserved:g} bytes are more than a quarter of the device's memory"
    prices, power = cluster.prices, cluster.power
    if prices.spot and prices.spot > cluster.price > 0:
        yield f"prices.spot={prices.spot:g} is more than the price on demand, {cluster.price:g}"
    if prices.spot and not prices.interruptions:
        yield "prices.spot has no prices.interruptions beside it, so that spot looks as safe as on demand"
    if power.device > _MOST_WATTS:
        yield f"power.device={power.device:g} W is much for one device: a node's power / {node}?"
    if cluster.host.memory and cluster.host.memory < cluster.host.devices * memory / 4:
        yield f"host.memory={cluster.host.memory:g} bytes are few beside the memory of the devices"
    if cluster.host.memory and cluster.host.devices % node and node % cluster.host.devices:
        yield f"host.devices={cluster.host.devices}, and {node} devices are in a node"
