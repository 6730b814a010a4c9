"""Measurements of a run that show the speed of its machines: seconds of compute and of communications.

Each quantity has its spread over the steps, relative to its seconds, because a run beside other work tells
little. Ranks of a pipeline's stage do equal work, so without a pipeline the differences between ranks count
too.

How much measured seconds vary: robust against a few slow steps, and not blind to many.

Other work on a machine only makes steps slower. A few slow steps change neither the median nor the median
absolute deviation. If most steps are slow, the median is a slow one, and the quick steps below it show that:
so the spread is the larger one of two estimates of the standard deviation, by the median absolute deviation
and by the tenth percentile, each with the factor that makes it right for normal times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, pstdev, quantiles
from typing import Any, TypeVar

from shoal.spec.cluster import Cluster, Device
from shoal.spec.cluster.cluster import LIMIT_OF_JITTER
from shoal.spec.plan import SettledPlan
from shoal.spec.plan.group import Group
from shoal.spec.timeline import Kind, Lane, Timeline, explain
from shoal.spec.timeline.breakdown import stopped_in
from shoal.spec.timeline.intervals import (
    Intervals,
    StepWindows,
    intersect,
    length,
    match_collectives,
    subtract,
    union,
)
from shoal.spec.timeline.series import seconds_by_kind
from shoal.spec.workload import Workload

FEWEST = 3
"""Number of measurements that have a spread."""

_DEVIATIONS = 1.4826  # standard deviations in a median absolute deviation of normal times
_TENTH = 1.2816  # standard deviations from the median of normal times to the tenth percentile


def spread_of(seconds: Sequence[float]) -> float:
    """Return the standard deviation of seconds over their median; infinity if they are too few to tell."""
    if len(seconds) < FEWEST:
        return math.inf
    middle = median(seconds)
    if middle <= 0:
        return math.inf
    around = _DEVIATIONS * median(abs(each - middle) for each in seconds)
    below = (middle - quantiles(seconds, n=10, method="inclusive")[0]) / _TENTH
    return max(around, below) / middle


def difference(seconds: Sequence[float]) -> float:
    """Return the standard deviation of seconds over their mean; 0 if all are 0."""
    return pstdev(seconds) / fmean(seconds) if any(seconds) else 0.0


def both(first: float, second: float) -> float:
    """Return the spread from two independent causes."""
    return math.hypot(first, second)


SENDS = ("activation", "gradient", "shift")
"""Operations that send a message to one rank."""

_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
_WARM_UP = 2  # steps
_LEAST_BYTES = 64 << 10  # least size of a transfer whose time depends on the rate and not on the latency

_Step = TypeVar("_Step")


@dataclass(frozen=True, slots=True)
class Transfer:
    """Communications of one name, size and group form.

    Attributes:
        operation: Name of the operation: the part of a span's name before the colon.
        nbytes: Bytes, as the span counts them.
        group: The ranks that took part.
        seconds: Median seconds of one communication, counted from when all ranks of the group are there.
        spread: Spread of these seconds, as a share of them.
    """

    operation: str
    nbytes: int
    group: Group
    seconds: float
    spread: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A run and its measured seconds in a step, as the mean over ranks.

    Attributes:
        workload: The work of the model that was trained.
        plan: The Plan that it ran under, with the micro-batch settled.
        batch: Samples of a step.
        compute: Seconds of forward and backward, without waits.
        optimizer: Seconds of the update.
        stragglers: Seconds that a rank waits for slower ranks.
        transfers: The collectives and messages.
        compute_spread, optimizer_spread: Spread of these seconds over steps and equal ranks, as a share of
            them; infinite if there are too few steps to tell.
        stragglers_spread: Standard error of these seconds, as a share of them.
    """

    workload: Workload
    plan: SettledPlan
    batch: int
    compute: float
    optimizer: float
    stragglers: float = 0.0
    transfers: tuple[Transfer, ...] = ()
    compute_spread: float = 0.0
    optimizer_spread: float = 0.0
    stragglers_spread: float = 0.0

    @classmethod
    def of(cls, workload: Workload, plan: SettledPlan, batch: int, timeline: Timeline) -> Observation:
        """Make the observation from a Timeline.

        Raises:
            ShoalError: No rank finished a step.
        """
        kinds, alike = seconds_by_kind(timeline), plan.pp == 1
        return cls(
            workload=workload,
            plan=plan,
            batch=batch,
            compute=kinds["forward"] + kinds["backward"],
            optimizer=kinds["optimizer"],
            stragglers=kinds["straggler_wait"],
            transfers=transfers_of(timeline),
            compute_spread=_spread(timeline, (Kind.FORWARD, Kind.BACKWARD), alike=alike),
            optimizer_spread=_spread(timeline, (Kind.OPTIMIZER,), alike=alike),
            stragglers_spread=_spread_of_stragglers(timeline),
        )


def transfers_of(timeline: Timeline) -> tuple[Transfer, ...]:
    """Return the communications of a Timeline that show a rate: those that compute waited for, if any.

    A communication that runs beside compute can be slowed by it: on cores both take turns.
    """
    windows = {rank: steps for rank in timeline.ranks if (steps := StepWindows(timeline, rank))}
    waited: dict[tuple[str, int, Group], list[float]] = {}
    hidden: dict[tuple[str, int, Group], list[float]] = {}
    for rank, arrivals in match_collectives(timeline, windows).items():
        waits = _waits(timeline, rank)
        for arrival in arrivals:
            span, operation = arrival.span, arrival.span.name.partition(":")[0]
            took = span.stop - arrival.complete
            is_known = operation in (*_COLLECTIVES, *SENDS) and len(span.group) > 1
            if not is_known or span.bytes < _LEAST_BYTES or took <= 0:
                continue
            key = operation, span.bytes, Group.of(span.group)
            exposed = length(intersect(waits, [(arrival.complete, span.stop)]))
            (waited if exposed > took / 2 else hidden).setdefault(key, []).append(took)
    return tuple(Transfer(*key, median(took), spread_of(took)) for key, took in (waited or hidden).items())


def _waits(timeline: Timeline, rank: int) -> Intervals:
    return union(
        (span.start, span.stop)
        for span in timeline.of(rank)
        if span.lane == Lane.COMPUTE and span.kind == Kind.WAIT
    )


def _spread(timeline: Timeline, kinds: tuple[Kind, ...], *, alike: bool) -> float:
    """Return the spread of some kinds' seconds: the median rank's over its steps, and that of equal ranks."""
    by_rank = list[list[float]]()
    for rank in timeline.ranks:
        spans = timeline.of(rank)
        worked = union((span.start, span.stop) for span in spans if span.kind in kinds)
        own = subtract(worked, stopped_in(spans))
        steps = _settled(StepWindows(timeline, rank))
        by_rank.append([length(intersect(own, [window])) for window in steps])
    over_steps = median(map(spread_of, by_rank))
    if not alike or any(not steps for steps in by_rank):
        return over_steps
    return both(over_steps, difference([median(steps) for steps in by_rank]))


def _spread_of_stragglers(timeline: Timeline) -> float:
    """Return the standard error of a step's waits for later ranks, as a share of them."""
    by_rank = [
        [parts.straggler_wait or 0.0 for parts in _settled(rank.steps)] for rank in explain(timeline).ranks
    ]
    means = [fmean(waits) for waits in zip(*by_rank, strict=False)]
    return spread_of(means) / math.sqrt(len(means)) if means else math.inf


def _settled(steps: Mapping[int, _Step]) -> list[_Step]:
    """Return the steps in order, without the first ones, which warm up, if enough are left."""
    found = [steps[index] for index in sorted(steps)]
    return found[_WARM_UP:] if len(found) >= _WARM_UP + FEWEST else found


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
