"""Corrects a Cluster by what a run measured, so that the next prediction is nearer.

What is compared, and what each difference corrects:

    the optimizer's seconds of a step              bandwidth_share: an update is passes over memory only
    forward and backward of a step, without        product_share and both attention shares, by one factor, as
    what they wait for                             no span tells products and attention apart
    each collective's seconds, from when all of    share of the level that its group spans: the median over
    its group were there                           the collectives that are large enough to show it

Shares are parts of what a data sheet says: one that would leave (0, 1] ends at its bound, and the rest of the
difference is told as `left`. Each is looked for with the cost model itself, which is quicker with every
larger share, so that formulas stand in one place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from statistics import median

from shoal.cluster import Cluster
from shoal.cost.network import Group, collective_seconds, send_seconds
from shoal.cost.step import Costs
from shoal.plan import Plan
from shoal.timeline import Timeline
from shoal.timeline.kinds import seconds_by_kind
from shoal.timeline.matching import match_collectives
from shoal.timeline.windows import StepWindows
from shoal.workload import Workload

__all__ = ["Calibration", "Correction", "Measured", "Transfer", "calibrate", "measured_of"]

_LEAST_SHARE = 1e-3
_HALVINGS = 40  # of the interval in which a share is looked for
_LEAST_BYTES = 64 << 10  # of a transfer whose time the rate decides, and not the latency
_COMPUTE_SHARES = ("product_share", "attention_share", "attention_backward_share")
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
_SENDS = ("activation", "gradient", "shift")


@dataclass(frozen=True, slots=True)
class Transfer:
    """Collectives of one name, size and group form.

    Attributes:
        operation: Of a span's name, the part before the colon.
        nbytes: As the span counts them.
        group: Who took part.
        seconds: Of one, from when all of its group were there: the median.
    """

    operation: str
    nbytes: int
    group: Group
    seconds: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run measured of a step: seconds of a rank, the mean over ranks.

    Attributes:
        compute: Forward and backward, without what they wait for.
        optimizer: The update.
        transfers: Collectives and messages.
    """

    compute: float
    optimizer: float
    transfers: tuple[Transfer, ...] = ()


@dataclass(frozen=True, slots=True)
class Correction:
    """What one difference changed.

    Attributes:
        name: Of what was compared: "compute", "optimizer", or a level's name.
        measured, before, after: Seconds: measured, predicted with the Cluster as it was, and as it is now.
    """

    name: str
    measured: float
    before: float
    after: float

    @property
    def left(self) -> float:
        """What still is between prediction and measurement, as a share of the measured seconds."""
        return self.after / self.measured - 1


@dataclass(frozen=True, slots=True)
class Calibration:
    """A Cluster that was corrected, and how."""

    cluster: Cluster
    corrections: tuple[Correction, ...]


def calibrate(
    cluster: Cluster, workload: Workload, plan: Plan, batch: int, measured: Measured | Timeline
) -> Calibration:
    """The Cluster with which predictions of this run would have come closest.

    Args:
        cluster: What predictions were made with.
        workload: What was trained.
        plan: Its layout, with the micro-batch settled.
        batch: Samples of a step.
        measured: What the run took; a Timeline is read with `measured_of`.

    Raises:
        ShoalError: The Timeline holds no finished step.
    """
    seen = measured_of(measured) if isinstance(measured, Timeline) else measured
    corrections = []

    def optimizer(changed: Cluster) -> float:
        return Costs(workload, changed).step(plan, batch).parts["optimizer"]

    def compute(changed: Cluster) -> float:
        return _compute(Costs(workload, changed), plan, batch)

    before = cluster
    if seen.optimizer > 0:
        cluster = _with_share(cluster, ("bandwidth_share",), optimizer, seen.optimizer)
        corrections.append(Correction("optimizer", seen.optimizer, optimizer(before), optimizer(cluster)))
    if seen.compute > 0:
        cluster = _with_share(cluster, _COMPUTE_SHARES, compute, seen.compute)
        corrections.append(Correction("compute", seen.compute, compute(before), compute(cluster)))
    for index, level in enumerate(cluster.levels):
        transfers = [each for each in seen.transfers if _level_of(each, cluster) == index]
        if transfers:
            cluster = _with_level_share(cluster, index, transfers)
            took = sum(each.seconds for each in transfers)
            corrections.append(
                Correction(level.name, took, _predicted(transfers, before), _predicted(transfers, cluster))
            )
    return Calibration(cluster, tuple(corrections))


def measured_of(timeline: Timeline) -> Measured:
    """What a Timeline says of a step.

    Raises:
        ShoalError: No rank finished a step.
    """
    kinds = seconds_by_kind(timeline)
    windows = {rank: steps for rank in timeline.ranks if (steps := StepWindows(timeline, rank))}
    seconds: dict[tuple[str, int, Group], list[float]] = {}
    for arrivals in match_collectives(timeline, windows).values():
        for arrival in arrivals:
            span = arrival.span
            operation = span.name.partition(":")[0]
            took = span.stop - arrival.complete
            known = operation in (*_COLLECTIVES, *_SENDS) and len(span.group) > 1
            if known and span.bytes >= _LEAST_BYTES and took > 0:
                stride = span.group[1] - span.group[0]
                key = operation, span.bytes, Group(len(span.group), max(1, stride))
                seconds.setdefault(key, []).append(took)
    transfers = tuple(Transfer(*key, median(took)) for key, took in seconds.items())
    return Measured(kinds["forward"] + kinds["backward"], kinds["optimizer"], transfers)


def _compute(costs: Costs, plan: Plan, batch: int) -> float:
    """Seconds of forward and backward of a step without communication, the mean over the ranks of pp."""
    assert plan.microbatch is not None
    count = batch // plan.dp // plan.microbatch
    stages = costs.stages(plan, count)
    return count * sum(each.total - each.tensor - each.context - each.expert for each in stages) / len(stages)


def _level_of(transfer: Transfer, cluster: Cluster) -> int:
    """Index of the innermost level whose links join all of the group."""
    span = transfer.group.size * transfer.group.stride
    return next(
        (i for i, level in enumerate(cluster.levels) if span <= level.devices), len(cluster.levels) - 1
    )


def _predicted(transfers: Iterable[Transfer], cluster: Cluster) -> float:
    return sum(_transfer_seconds(each, cluster) for each in transfers)


def _transfer_seconds(transfer: Transfer, cluster: Cluster) -> float:
    if transfer.operation in _SENDS:
        return send_seconds(transfer.nbytes, transfer.group.stride, cluster)
    return collective_seconds(transfer.operation, transfer.nbytes, transfer.group, cluster)


def _with_level_share(cluster: Cluster, index: int, transfers: Iterable[Transfer]) -> Cluster:
    """The Cluster with the level's share for which half of the transfers are quicker than predicted.

    The median, as a transfer that runs beside compute, or that a late rank held up, may take many times as
    long as it would alone.
    """
    chosen = list(transfers)
    level = cluster.levels[index]

    def scaled(factor: float) -> Cluster:
        share = min(1.0, max(_LEAST_SHARE, level.share * factor))
        levels = list(cluster.levels)
        levels[index] = replace(level, share=share)
        return cluster.replace(levels=tuple(levels))

    def ratio(factor: float) -> float:
        changed = scaled(factor)
        return median(_transfer_seconds(each, changed) / each.seconds for each in chosen)

    return scaled(_factor(ratio, 1.0))


def _with_share(
    cluster: Cluster, names: tuple[str, ...], seconds: Callable[[Cluster], float], wanted: float
) -> Cluster:
    """The Cluster whose device has these shares times the factor with which it takes the seconds wanted."""
    device = cluster.device

    def scaled(factor: float) -> Cluster:
        changes = {name: min(1.0, max(_LEAST_SHARE, getattr(device, name) * factor)) for name in names}
        return cluster.replace(device=replace(device, **changes))

    return scaled(_factor(lambda factor: seconds(scaled(factor)), wanted))


def _factor(seconds: Callable[[float], float], wanted: float) -> float:
    """By bisection: the factor of a rate, between a thousandth and a thousand, that gives these seconds."""
    low, high = math.log(1e-3), math.log(1e3)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if seconds(math.exp(middle)) > wanted:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)
