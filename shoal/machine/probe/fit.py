"""Find the Cluster whose predictions are closest to the measurements.

Quantities are fitted one after another, each from the measurements that it alone determines. Passes and
streams give the memory's rates; products give the peak and the depth at which half of it is reached;
attention gives its shares. Then, level by level from the inside, links give rate, latency and half size, and
synchronisations give the variation of ranks. Closeness is relative: the fit minimises the mean squared
logarithm of predicted over measured seconds, so that a small operation counts as much as a large one.

If a data sheet gives the peak of a device or link, that is the peak, and programs reach a share of it. If
there is none, as for cores, the peak is the highest measured rate. A known GPU starts from its preset, and
keeps what is not measured. A probe repeats an operation for tens of milliseconds, in which the clock falls
half of the way that long steps make it fall. `trusted` says which measurements count.

Minimise a function of a few positive numbers, whose sizes may differ by orders of magnitude.

All steps are in logarithms. A coarse grid over the bounds gives the start. From there the search steps to the
best neighbour, including diagonals, since numbers may trade for one another. If no neighbour is better, the
step is halved, until it is a thousandth.

Which measurements are the device's, and which fits can be trusted.

An operation of a GPU that was timed with its start by the host (`Measurements.is_apart` is False) shows the
host's seconds if the device is quicker. The host's seconds vary by about two times between operations, so
operations that took less than `_HOST` times the quickest of their kind are left out.

A fit whose median error is larger than `DOUBTFUL` for a kind of operations is not written: the device keeps
the preset's values of those quantities. If no preset has the device, the fitted values stay, and the
description's source says that they are doubtful. A jitter or a noise above `_MUCH` is written, and told.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, linear_regression, median
from typing import Any, TypeVar

from shoal.machine.probe.measurements import (
    AttentionTime,
    CollectiveTime,
    Measurement,
    Measurements,
    PassTime,
    ProductTime,
    SendTime,
    SynchronisationTime,
)
from shoal.machine.probe.sheet import Sheet
from shoal.predict.cost.time import behind_the_mean, depth_of
from shoal.spec.cluster import Cluster, Device, Level, known_device
from shoal.spec.cluster.cluster import LIMIT_OF_JITTER

_POINTS = 5  # points of the coarse grid, along each number
_SMALLEST_STEP = 1e-3  # of a logarithm: the relative error of the result

_Point = tuple[float, ...]


def least(of: Callable[[_Point], float], bounds: Sequence[tuple[float, float]]) -> _Point:
    """Return a point where the function is least, compared with its neighbours.

    Args:
        of: The function; it takes one number for each bound.
        bounds: Lowest and highest value of each number, above 0.
    """
    edges = [(math.log(low), math.log(high)) for low, high in bounds]

    def value(point: _Point) -> float:
        return of(tuple(map(math.exp, point)))

    axes = [[low + (high - low) * index / (_POINTS - 1) for index in range(_POINTS)] for low, high in edges]
    best = min(itertools.product(*axes), key=value)
    reached = value(best)
    step = max(high - low for low, high in edges) / (2 * _POINTS)
    while step >= _SMALLEST_STEP:
        nearest = min(_neighbours(best, step, edges), key=value)
        if (found := value(nearest)) < reached:
            best, reached = nearest, found
        else:
            step /= 2
    return tuple(map(math.exp, best))


def _neighbours(point: _Point, step: float, edges: Sequence[tuple[float, float]]) -> list[_Point]:
    moved = [
        {min(max(at + move, low), high) for move in (-step, 0.0, step)}
        for at, (low, high) in zip(point, edges, strict=True)
    ]
    return list(itertools.product(*moved))


DOUBTFUL = 0.25
"""Median error of a kind of operations above which its fit is not used."""

_HOST = 2.5
_MUCH = 0.3  # jitter or noise

_FIELDS: Mapping[str, tuple[str, ...]] = {
    "products fp32": ("product_share", "product_depth"),
    "products bf16": ("product_share", "product_depth"),
    "passes over memory": ("bandwidth_share",),
    "streams": ("stream_share",),
    "attention forward": ("attention_share",),
    "attention backward": ("attention_backward_share",),
}
"""Fields of a Device that are fitted to each quantity."""

_Timed = TypeVar("_Timed", ProductTime, PassTime, AttentionTime)


@dataclass(frozen=True, slots=True)
class FitError:
    """Errors of the predictions of one quantity, as shares of the measured seconds.

    Attributes:
        quantity: Name, such as "products fp32".
        measured: Number of measurements.
        median: Median of the absolute errors.
        worst: Largest absolute error.
    """

    quantity: str
    measured: int
    median: float
    worst: float


def of_the_device(measured: Measurements, *, on_cores: bool) -> Measurements:
    """Return the measurements without those that are the host's."""
    if on_cores or measured.is_apart:
        return measured
    return replace(
        measured,
        products=_longer(measured.products, lambda each: each.precision),
        passes=_longer(measured.passes, lambda each: each.name),
        attention=_longer(measured.attention, lambda each: each.half),
    )


def _longer(times: Sequence[_Timed], kind: Callable[[_Timed], Hashable]) -> tuple[_Timed, ...]:
    least: dict[Hashable, float] = {}
    for each in times:
        least[kind(each)] = min(each.seconds, least.get(kind(each), each.seconds))
    # What moves more than caches hold is no small operation, though it may be the only one of its kind.
    return tuple(
        each
        for each in times
        if each.seconds >= _HOST * least[kind(each)] or (isinstance(each, PassTime) and each.is_stream)
    )


def errors_of(measured: Iterable[Measurement], cluster: Cluster) -> tuple[FitError, ...]:
    """Return the errors of each quantity."""
    by_quantity: dict[str, list[float]] = {}
    for each in measured:
        error = abs(each.predicted(cluster) / each.seconds - 1)
        by_quantity.setdefault(each.quantity, []).append(error)
    return tuple(
        FitError(quantity, len(errors), median(errors), max(errors))
        for quantity, errors in by_quantity.items()
    )


def trusted(
    fitted: Cluster, errors: Sequence[FitError], preset: Device | None
) -> tuple[Cluster, tuple[str, ...]]:
    """Return the Cluster without the fits that err too much, and a sentence about each.

    Args:
        fitted: The Cluster that fits the measurements best.
        errors: Errors of its predictions.
        preset: The device as a data file describes it; None if none does.
    """
    told = tuple(_doubts(errors, preset))
    unsteady = tuple(_unsteadiness(fitted))
    if not told:
        return fitted, unsteady
    doubtful = [each for each in errors if each.median > DOUBTFUL]
    names = sorted({name for each in doubtful for name in _FIELDS.get(each.quantity, ())})
    device = fitted.device
    if preset is None:
        source = f"{device.source}; doubtful, since the fit errs: {', '.join(names)}"
    else:
        device = replace(device, **{name: getattr(preset, name) for name in names})
        source = f"{device.source}; as of the preset, since the fit errs: {', '.join(names)}"
    return fitted.replace(device=replace(device, source=source)), (*told, *unsteady)


def _doubts(errors: Iterable[FitError], preset: Device | None) -> Iterator[str]:
    for each in errors:
        if each.median <= DOUBTFUL:
            continue
        fields = ", ".join(_FIELDS.get(each.quantity, ()))
        kept = f"; {fields} stay as fitted" if preset is None else f"; {fields} stay the preset's"
        yield (
            f"the fit of {each.quantity} errs by {each.median:.0%} in the median{kept if fields else ''}: "
            "end what else runs on the machine and probe again without --quick, or measure the Plans that "
            "depend on it"
        )


def _unsteadiness(cluster: Cluster) -> Iterator[str]:
    advice = "end what else runs on the machine and probe again, or set {} in the Cluster"
    if cluster.jitter > _MUCH:
        yield (
            f"steps of ranks vary by {cluster.jitter:.0%} or more, where 2 % are usual: "
            f"{advice.format('jitter')}"
        )
    if cluster.noise > _MUCH:
        yield (
            f"work of a second varies by {1e3 * cluster.noise:.0f} ms or more within a step, where 3 ms are "
            f"usual: {advice.format('noise')}"
        )


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
