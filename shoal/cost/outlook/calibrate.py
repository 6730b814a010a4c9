"""Corrects a Cluster by measurements of runs, so that the next prediction is nearer.

The left column is the quantity that is compared, the right column what its difference corrects:

    the optimizer's seconds of a step              the rate of the memory, because an update only passes over
                                                   memory
    forward and backward of a step, without        the rates of products and attention, by one factor, because
    waits                                          no span tells them apart
    each communication's seconds, once all         the rate of the level that its group spans: the median over
    ranks of its group are there                   the transfers that are large enough to show it
    waits for later ranks, without a pipeline      jitter: how much the ranks' steps vary

A GPU has a data sheet, and its rates are shares of the data sheet's. A share that would leave (0, 1] stays at
its bound, and `left` reports the rest of the difference. CPU cores have no such bound: their rates are
measured. On cores, caches decide how fast a pass is, and an update, which streams through memory, says
nothing about other passes. So forward and backward correct all rates of the device by one factor, and then
the optimizer corrects the rate of streams.

All runs have the same weight: predictions are too high and too low by the same proportion. The search for a
factor calls the cost model itself, whose seconds fall as any rate grows, so formulas stand in one place only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median
from typing import Any

from shoal.cluster import Cluster
from shoal.cost.collectives.crossings import joined_by
from shoal.cost.collectives.network import collective_seconds, send_seconds
from shoal.cost.outlook.observation import SENDS, Observation, Transfer
from shoal.cost.time.jitter import straggler_share
from shoal.cost.time.step import Costs

__all__ = ["Calibration", "Correction", "calibrate"]

_PRODUCT_SHARES = ("product_share", "attention_share", "attention_backward_share")  # once the clock is whole
_LEVEL_SHARES = ("share", "exchange_share", "packet_share", "reduction_share")
_LEAST_SHARE = 1e-3
_MOST_JITTER = 0.99
_HALVINGS = 40  # steps of the bisection for a factor
_LIMIT = 1e3  # largest factor; the smallest is 1 / _LIMIT
_STEADY = 0.05  # jitter for the factor if the Cluster has none


@dataclass(frozen=True, slots=True)
class Correction:
    """The effect of the correction of one quantity.

    Attributes:
        name: The quantity that was compared: "optimizer", "compute", a level's name, or "stragglers".
        measured, before, after: Seconds, summed over the runs: measured, predicted with the original Cluster,
            and predicted with the corrected one.
    """

    name: str
    measured: float
    before: float
    after: float

    @property
    def left(self) -> float:
        """Difference that is left between prediction and measurement, as a share of the measured seconds."""
        return self.after / self.measured - 1


@dataclass(frozen=True, slots=True)
class Calibration:
    """A corrected Cluster, and its corrections."""

    cluster: Cluster
    corrections: tuple[Correction, ...]


def calibrate(cluster: Cluster, observations: Sequence[Observation]) -> Calibration:
    """Return the Cluster whose predictions are closest to these runs.

    Args:
        cluster: The Cluster that predictions were made with.
        observations: Measurements of one run or more.

    Raises:
        ClusterError: The Cluster cannot have as many devices as a run had ranks.
    """
    found = cluster
    if cluster.cores:
        found = _corrected(found, _with_all_rates, _COMPUTE, observations)
        found = _corrected(found, _with_stream_rate, _OPTIMIZER, observations)
    else:
        found = _corrected(found, _with_memory_rate, _OPTIMIZER, observations)
        found = _corrected(found, _with_product_rates, _COMPUTE, observations)
    quantities = [_OPTIMIZER, _COMPUTE]
    for index, level in enumerate(cluster.levels):
        quantity = _transfers_over(index, level.name)
        found = _corrected(found, partial(_with_level_rate, index=index), quantity, observations)
        quantities.append(quantity)
    found = _corrected(found, _with_steadiness, _STRAGGLERS, observations)
    quantities.append(_STRAGGLERS)
    corrections = (_correction(each, observations, cluster, found) for each in quantities)
    return Calibration(found, tuple(each for each in corrections if each is not None))


@dataclass(frozen=True, slots=True)
class _Quantity:
    """A quantity that is compared.

    Attributes:
        name: Name of the correction.
        measured: Function that gives its measured seconds in a run, one by one.
        predicted: Function that gives its predicted seconds, one by one, on a Cluster with as many devices as
            the run had ranks.
    """

    name: str
    measured: Callable[[Observation, Cluster], Sequence[float]]
    predicted: Callable[[Observation, Cluster], Sequence[float]]

    def is_measured(self, observation: Observation, cluster: Cluster) -> bool:
        """Return whether the run measured this quantity."""
        measured = self.measured(observation, cluster)
        return bool(measured) and min(measured) > 0

    def error(self, observation: Observation, cluster: Cluster) -> float:
        """Return the logarithm of the median of predicted over measured seconds."""
        measured = self.measured(observation, cluster)
        pairs = zip(self.predicted(observation, cluster), measured, strict=True)
        return math.log(median(predicted / seconds for predicted, seconds in pairs))


def _correction(
    quantity: _Quantity, observations: Iterable[Observation], before: Cluster, after: Cluster
) -> Correction | None:
    sums = [0.0, 0.0, 0.0]
    for each in observations:
        old, new = _sized(before, each), _sized(after, each)
        sums[0] += sum(quantity.measured(each, old))
        sums[1] += sum(quantity.predicted(each, old))
        sums[2] += sum(quantity.predicted(each, new))
    return Correction(quantity.name, *sums) if sums[0] > 0 else None


def _sized(cluster: Cluster, observation: Observation) -> Cluster:
    ranks = observation.plan.ranks
    return cluster if cluster.devices == ranks else cluster.with_devices(ranks)


def _optimizer_seconds(observation: Observation, cluster: Cluster) -> float:
    costs, plan = Costs(observation.workload, cluster), observation.plan
    return costs.update_of(plan, plan.microbatches_of(observation.batch))


def _straggler_seconds(observation: Observation, cluster: Cluster) -> float:
    """Return the waits for late ranks within blocks, and for the slowest rank at the step's end."""
    costs, plan = Costs(observation.workload, cluster), observation.plan
    count = plan.microbatches_of(observation.batch)
    share = straggler_share(cluster)
    until = costs.least(plan, observation.batch) - costs.norm(plan) - costs.update_of(plan, count)
    slowest = max(costs.stages(plan, count), key=lambda stage: stage.total)
    return count * slowest.late + until * share / (1 + share)


def _compute_seconds(observation: Observation, cluster: Cluster) -> float:
    """Return the seconds of forward and backward without communication, the mean over the ranks of pp."""
    plan = observation.plan
    count = plan.microbatches_of(observation.batch)
    stages = Costs(observation.workload, cluster).stages(plan, count)
    waited = (each.tensor + each.context + each.expert + each.late for each in stages)
    return count * fmean(each.total - wait for each, wait in zip(stages, waited, strict=True))


_OPTIMIZER = _Quantity(
    "optimizer",
    lambda run, cluster: [run.optimizer],
    lambda run, cluster: [_optimizer_seconds(run, cluster)],
)
_COMPUTE = _Quantity(
    "compute",
    lambda run, cluster: [run.compute],
    lambda run, cluster: [_compute_seconds(run, cluster)],
)
_STRAGGLERS = _Quantity(
    "stragglers",
    lambda run, cluster: [run.stragglers] if run.plan.pp == 1 and run.plan.ranks > 1 else [],
    lambda run, cluster: [_straggler_seconds(run, cluster)],
)


def _transfers_over(index: int, name: str) -> _Quantity:
    """Make the quantity for the transfers whose innermost common level is this one."""

    def chosen(observation: Observation, cluster: Cluster) -> list[Transfer]:
        return [each for each in observation.transfers if _level_of(each, cluster) == index]

    return _Quantity(
        name,
        lambda run, cluster: [each.seconds for each in chosen(run, cluster)],
        lambda run, cluster: [_transfer_seconds(each, cluster) for each in chosen(run, cluster)],
    )


def _level_of(transfer: Transfer, cluster: Cluster) -> int:
    """Return the index of the innermost level whose links join all of the group."""
    return joined_by(transfer.group, tuple(level.devices for level in cluster.levels))


def _transfer_seconds(transfer: Transfer, cluster: Cluster) -> float:
    if transfer.operation in SENDS:
        return send_seconds(transfer.nbytes, transfer.group.stride, cluster)
    return collective_seconds(transfer.operation, transfer.nbytes, transfer.group, cluster)


def _with_all_rates(cluster: Cluster, factor: float) -> Cluster:
    return cluster.replace(device=cluster.device.slowed(1 / factor))


def _with_stream_rate(cluster: Cluster, factor: float) -> Cluster:
    device = cluster.device
    share = _share((device.stream_share or device.bandwidth_share) * factor)
    return cluster.replace(device=replace(device, stream_share=share))


def _with_memory_rate(cluster: Cluster, factor: float) -> Cluster:
    device = cluster.device
    changes = {name: getattr(device, name) for name in ("bandwidth_share", "stream_share")}
    shares: dict[str, Any] = {name: _share(value * factor) for name, value in changes.items() if value}
    return cluster.replace(device=replace(device, **shares))


def _with_product_rates(cluster: Cluster, factor: float) -> Cluster:
    device = cluster.device
    sustained = device.sustained * factor
    changes: dict[str, Any] = {"sustained": _share(sustained)}
    if sustained > 1:
        changes |= {name: _share(getattr(device, name) * sustained) for name in _PRODUCT_SHARES}
    return cluster.replace(device=replace(device, **changes))


def _with_steadiness(cluster: Cluster, factor: float) -> Cluster:
    return cluster.replace(jitter=min(_MOST_JITTER, (cluster.jitter or _STEADY) / factor))


def _with_level_rate(cluster: Cluster, factor: float, *, index: int) -> Cluster:
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


def _corrected(
    cluster: Cluster,
    with_rate: Callable[[Cluster, float], Cluster],
    quantity: _Quantity,
    observations: Iterable[Observation],
) -> Cluster:
    """Return the Cluster with one rate times the factor that makes the mean error of the runs zero.

    Bisection finds the factor, between 1 / `_LIMIT` and `_LIMIT`.
    """
    measured = [each for each in observations if quantity.is_measured(each, _sized(cluster, each))]
    if not measured:
        return cluster
    low, high = -math.log(_LIMIT), math.log(_LIMIT)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        changed = with_rate(cluster, math.exp(middle))
        if fmean(quantity.error(each, _sized(changed, each)) for each in measured) > 0:
            low = middle
        else:
            high = middle
    return with_rate(cluster, math.exp((low + high) / 2))
