"""Find the Cluster whose predictions are closest to the measurements.

Quantities are fitted one after another, each from the measurements that it alone determines. Passes and
streams give the memory's rates; products give the peak and the depth at which half of it is reached;
attention gives its shares. Then, level by level from the inside, links give rate, latency and half size, and
synchronisations give the variation of ranks. Closeness is relative: the fit minimises the mean squared
logarithm of predicted over measured seconds, so that a small operation counts as much as a large one.

If a data sheet gives the peak of a device or link, that is the peak, and programs reach a share of it. If
there is none, as for cores, the peak is the highest measured rate. A known GPU starts from its preset, and
keeps what is not measured. A probe repeats an operation for tens of milliseconds, in which the clock falls
half of the way that long steps make it fall. `trust.py` says which measurements count, and which fits are
used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import fmean, linear_regression
from typing import Any

from shoal.cluster import Cluster, Device, Level, known_device
from shoal.cluster.cluster import LIMIT_OF_JITTER
from shoal.cost.time import behind_the_mean, depth_of
from shoal.probe.grid import least
from shoal.probe.measurements import (
    CollectiveTime,
    Measurement,
    Measurements,
    PassTime,
    ProductTime,
    SendTime,
    SynchronisationTime,
)
from shoal.probe.sheet import Sheet
from shoal.probe.trust import of_the_device

_SHARES = (1e-3, 1.0)
_DEPTHS = (1.0, 4096.0)
_SETUPS = (1e-7, 1e-2)  # only for the innermost level: a collective has one setup
_LATENCIES = (1e-7, 1e-2)
_HALF_SIZES = (1.0, 64e6)
_BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "all_to_all": lambda ranks: (ranks - 1) / ranks,
}
_DEEP = 4  # times the depth: products with more inputs than that tell nothing about it
_LOWERED = 0.5  # share of the way that the clock falls while a probe repeats an operation
_CPU_TILE = (16, 16)  # tile of products on cores: edges cost little


def fit(measured: Measurements, sheet: Sheet, name: str) -> Cluster:
    """Return the Cluster that fits best.

    Args:
        measured: The measurements.
        sheet: Facts about the machine that need no measuring.
        name: Name of the Cluster.
    """
    measured = of_the_device(measured, on_cores=sheet.on_cores)
    device = _start(measured, sheet)
    level = Level(name=sheet.inside, devices=1, bandwidth=device.bandwidth, source="one device: no links")
    cores = sheet.cores if sheet.on_cores else 0
    cluster = Cluster(name=name, device=device, levels=(level,), cores=cores, source=sheet.source)
    cluster = _fit_passes(cluster, [each for each in measured.passes if not each.is_warm])
    cluster = _fit_products(cluster, measured.products, sheet)
    for half, share in (("forward", "attention_share"), ("backward", "attention_backward_share")):
        chosen = [each for each in measured.attention if each.half == half]
        cluster = _fit_share(cluster, share, chosen)
    return _fit_synchronisations(_fit_levels(cluster, measured.links, sheet), measured.synchronisations)


def _start(measured: Measurements, sheet: Sheet) -> Device:
    """Return the device before the fit: with the known facts, and the values that are measured directly."""
    facts: dict[str, Any] = {
        "name": sheet.device,
        "memory": sheet.memory,
        "units": sheet.units,
        "launch": measured.launch,
        "dispatch": measured.dispatch,
        "graph": measured.graph,
        "source": sheet.source,
    }
    if sheet.devices_per_host > 1 or sheet.on_cores:
        facts["contention"] = measured.contention
    preset = None if sheet.on_cores else known_device(sheet.device)
    if preset is not None:
        return replace(preset, **facts, sustained=preset.sustained**_LOWERED)
    peak = {
        precision: max(rates)
        for precision in ("fp32", "bf16")
        if (rates := [each.rate for each in measured.products if each.precision == precision])
    }
    return Device(
        bandwidth=max(each.rate for each in measured.passes if not each.is_warm),
        peak=peak,
        tile=_CPU_TILE if sheet.on_cores else (256, 128),
        stall=1.0 if sheet.on_cores else 0.0,
        **facts,
    )


def _fit_passes(cluster: Cluster, passes: Sequence[PassTime]) -> Cluster:
    for share, is_stream in (("bandwidth_share", False), ("stream_share", True)):
        chosen = [each for each in passes if each.is_stream == is_stream]
        cluster = _fit_share(cluster, share, chosen)
    return cluster


def _fit_products(cluster: Cluster, products: Sequence[ProductTime], sheet: Sheet) -> Cluster:
    """Fit the share of a data sheet's peaks, or the peaks themselves without one; and the depth."""
    by_precision = {
        precision: [each for each in products if each.precision == precision]
        for precision in ("bf16", "fp32")  # the depth is in bf16, and follows from its peak in fp32
    }

    def with_share(values: tuple[float, ...]) -> Cluster:
        return _of_device(cluster, product_share=values[0], product_depth=values[1])

    def with_depth(values: tuple[float, ...]) -> Cluster:
        found = _of_device(cluster, product_share=1.0, product_depth=values[0])
        for precision, measured in by_precision.items():

            def with_peak(
                rate: tuple[float, ...], precision: str = precision, found: Cluster = found
            ) -> Cluster:
                device = found.device
                return found.replace(device=replace(device, peak={**device.peak, precision: rate[0]}))

            quickest = max(each.rate for each in measured)
            found = _closest(found, with_peak, measured, [(quickest / 2, quickest * 4)])
        return found

    if sheet.on_cores:
        return _closest(cluster, with_depth, products, [_DEPTHS])
    if all(each.inputs > _DEEP * depth_of(cluster.device, each.precision) for each in products):
        return _fit_share(cluster, "product_share", products)
    return _closest(cluster, with_share, products, [_SHARES, _DEPTHS])


def _fit_share(cluster: Cluster, share: str, measured: Sequence[Measurement]) -> Cluster:
    """Fit the device's share of this name."""

    def with_share(values: tuple[float, ...]) -> Cluster:
        return _of_device(cluster, **{share: values[0]})

    return _closest(cluster, with_share, measured, [_SHARES])


def _fit_synchronisations(cluster: Cluster, synchronisations: Sequence[SynchronisationTime]) -> Cluster:
    """Fit jitter and noise: after w seconds of work, waiting takes a w + b sqrt(w), neither below 0.

    Least squares of the wait per second of work, since the noise of a time is proportional to it. Where other
    programs keep a rank from its core for longer than it works, both are the most that a Cluster may have.
    """
    if not synchronisations:
        return cluster
    added = [each.seconds / each.work for each in synchronisations]
    roots = [each.work**-0.5 for each in synchronisations]
    noise = max(0.0, linear_regression(roots, added).slope)
    jitter = fmean(added) - noise * fmean(roots)
    if jitter < 0:
        jitter, noise = 0.0, max(0.0, linear_regression(roots, added, proportional=True).slope)
    behind = behind_the_mean(synchronisations[0].ranks)
    return cluster.replace(
        jitter=min(LIMIT_OF_JITTER, jitter / behind), noise=min(LIMIT_OF_JITTER, noise / behind)
    )


def _fit_levels(cluster: Cluster, links: Sequence[CollectiveTime | SendTime], sheet: Sheet) -> Cluster:
    levels: tuple[Level, ...] = ()
    for index in sorted({each.level for each in links}):
        timed = [each for each in links if each.level == index]
        level = Level(
            name="network" if index else sheet.inside,
            devices=sheet.devices if index else sheet.devices_per_host,
            bandwidth=(sheet.network if index else 0.0) or max(_rate(each, sheet) for each in timed),
            source=sheet.source,
        )

        def with_level(values: tuple[float, ...], inner: tuple[Level, ...] = levels) -> Cluster:
            share, latency, half_size, *setup = values
            fitted = replace(level, share=share, latency=latency, half_size=half_size)  # noqa: B023
            if setup:
                fitted = replace(fitted, setup=setup[0])
            return cluster.replace(levels=(*inner, fitted))

        bounds = [_SHARES, _LATENCIES, _HALF_SIZES, *([] if levels else [_SETUPS])]
        levels = _closest(cluster, with_level, timed, bounds).levels
    return cluster.replace(levels=levels) if levels else cluster


def _rate(measured: CollectiveTime | SendTime, sheet: Sheet) -> float:
    """Return the bytes/s of one device over the busiest link, for any algorithm."""
    if isinstance(measured, SendTime):
        return measured.nbytes / measured.seconds
    factor = _BUS_FACTORS.get(measured.collective, lambda ranks: 1.0)
    rate: float = factor(measured.group.size) * measured.nbytes / measured.seconds
    all_of_a_host_send = measured.level and measured.group.stride == 1
    return rate / sheet.devices_per_host if all_of_a_host_send else rate


def _of_device(cluster: Cluster, **changes: float) -> Cluster:
    return cluster.replace(device=replace(cluster.device, **changes))  # type: ignore[arg-type]


def _closest(
    unchanged: Cluster,
    with_values: Callable[[tuple[float, ...]], Cluster],
    measured: Iterable[Measurement],
    bounds: Sequence[tuple[float, float]],
) -> Cluster:
    """Return the Cluster, among those that values make, whose predictions are closest to the measurements.

    Return it unchanged if there are none.
    """
    chosen = list(measured)
    if not chosen:
        return unchanged

    def distance(values: tuple[float, ...]) -> float:
        cluster = with_values(values)
        return math.fsum(math.log(each.predicted(cluster) / each.seconds) ** 2 for each in chosen)

    return with_values(least(distance, bounds))
