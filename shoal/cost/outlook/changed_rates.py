"""Clusters with one kind of rates changed by a factor, within the bounds of a data sheet."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shoal.cluster import Cluster, Device
from shoal.cluster.cluster import LIMIT_OF_JITTER

_PRODUCT_SHARES = ("product_share", "attention_share", "attention_backward_share")  # once the clock is whole
_LEVEL_SHARES = ("share", "exchange_share", "packet_share", "reduction_share")
_LEAST_SHARE = 1e-3
_STEADY = 0.05  # jitter for the factor if the Cluster has none


def with_all_rates(cluster: Cluster, factor: float) -> Cluster:
    """Return the Cluster with all rates of the device times a factor."""
    return cluster.with_each_device(lambda device: device.slowed(1 / factor))


def with_stream_rate(cluster: Cluster, factor: float) -> Cluster:
    """Return the Cluster with the rate of streams times a factor."""

    def changed(device: Device) -> Device:
        share = _share((device.stream_share or device.bandwidth_share) * factor)
        return replace(device, stream_share=share)

    return cluster.with_each_device(changed)


def with_memory_rate(cluster: Cluster, factor: float) -> Cluster:
    """Return the Cluster with the rates of passes over memory and of streams times a factor."""

    def changed(device: Device) -> Device:
        changes = {name: getattr(device, name) for name in ("bandwidth_share", "stream_share")}
        shares: dict[str, Any] = {name: _share(value * factor) for name, value in changes.items() if value}
        return replace(device, **shares)

    return cluster.with_each_device(changed)


def with_product_rates(cluster: Cluster, factor: float) -> Cluster:
    """Return the Cluster with the rates of products and attention times a factor."""

    def changed(device: Device) -> Device:
        sustained = device.sustained * factor
        changes: dict[str, Any] = {"sustained": _share(sustained)}
        if sustained > 1:
            changes |= {name: _share(getattr(device, name) * sustained) for name in _PRODUCT_SHARES}
        return replace(device, **changes)

    return cluster.with_each_device(changed)


def with_steadiness(cluster: Cluster, factor: float) -> Cluster:
    """Return the Cluster with its jitter divided by a factor."""
    return cluster.replace(jitter=min(LIMIT_OF_JITTER, (cluster.jitter or _STEADY) / factor))


def with_level_rate(cluster: Cluster, factor: float, *, index: int) -> Cluster:
    """Return the Cluster with the rates of one level of links times a factor."""
    level = cluster.levels[index]
    if cluster.cores:
        level = replace(level, bandwidth=level.bandwidth * factor)
    else:
        reached = {name: getattr(level, name) for name in _LEVEL_SHARES}
        shares: dict[str, Any] = {name: _share(share * factor) for name, share in reached.items() if share}
        level = replace(level, **shares)
    return cluster.replace(levels=(*cluster.levels[:index], level, *cluster.levels[index + 1 :]))


def _share(value: float) -> float:
    return min(1.0, max(_LEAST_SHARE, value))
