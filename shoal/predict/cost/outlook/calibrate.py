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

A run beside other work must not spoil the description. Each quantity has its spread s over the run's steps
(`shoal.predict.cost.outlook.observation`). Let d be the logarithm of predicted over measured seconds. Then

- runs count by 1 / (s^2 + 3 %^2): if they are equally steady, predictions are too high for some and too low
  for others by the same proportion;
- the share max(0, 1 - (s / d)^2) of the difference is corrected (James and Stein, 1961): all of it in steady
  runs, and none if it is within the spread;
- nothing is corrected by less than 0.1 % of the measured seconds, or by fewer than three steps;
- a run whose compute varies by more than 10 % over steps or equal ranks was beside other work. It corrects
  nothing, unless its compute differs by five times that spread; and no jitter in any case.

A `Correction` says the share, and the reason if it is not the whole. The search for a factor calls the cost
model itself, whose seconds fall as any rate grows, so formulas stand in one place only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import TypeAlias

from shoal.errors import ConfigError
from shoal.predict.cost.collectives.link_use import joined_by, message_seconds
from shoal.predict.cost.collectives.network import collective_seconds
from shoal.predict.cost.outlook.observation import (
    SENDS,
    Observation,
    Transfer,
    with_all_rates,
    with_level_rate,
    with_memory_rate,
    with_product_rates,
    with_steadiness,
    with_stream_rate,
)
from shoal.predict.cost.time.jitter import straggler_share
from shoal.predict.cost.time.step import Costs
from shoal.spec.cluster import Calibrated, Cluster
from shoal.spec.plan import Boundary, Group

_WithRate: TypeAlias = Callable[[Cluster, float], Cluster]

_HALVINGS = 40  # steps of the bisection for a factor
_LIMIT = 1e3  # largest factor; the smallest is 1 / _LIMIT
_STEADY = 0.05  # spread of compute with which a run tells its seconds
_MODEL = 0.03  # error of the cost model for one run, beside the run's spread
_LEAST_SECONDS = 0.001  # share of a run's measured seconds
_UNSTEADY = 0.1  # spread of compute above which other work disturbed a run
_FAR = 5  # spreads of an unsteady run's compute beyond which a difference is not its neighbours'
_MOST_ERROR = 0.99


@dataclass(frozen=True, slots=True)
class Correction:
    """The effect of the correction of one quantity.

    Attributes:
        name: The quantity that was compared: "optimizer", "compute", a level's name, or "stragglers".
        measured, before, after: Seconds, summed over the runs: measured, predicted with the original Cluster,
            and predicted with the corrected one.
        spread: Spread of the measured seconds over the steps, as a share of them.
        corrected: Share of the difference that was corrected, unless a bound of the data sheet forbade it.
        reason: Why less than half of the difference was corrected; empty if more was.
    """

    name: str
    measured: float
    before: float
    after: float
    spread: float = 0.0
    corrected: float = 1.0
    reason: str = ""

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
        ConfigError: A run's ranks did unequal work, by the Plan's `shares`: quantities are means over ranks.
    """
    for each in observations:
        if each.plan.shared is not None and not each.plan.is_padded:
            raise ConfigError(
                f"a run of the Plan {each.plan} was given, whose ranks do unequal work",
                possible="runs without shares",
                change="make some steps without shares, and give that run",
            )
    quantities: list[tuple[_Quantity, _WithRate]] = (
        [(_COMPUTE, with_all_rates), (_OPTIMIZER, with_stream_rate)]
        if cluster.cores
        else [(_OPTIMIZER, with_memory_rate), (_COMPUTE, with_product_rates)]
    )
    for index, level in enumerate(cluster.levels):
        quantities.append((_transfers_over(index, level.name), partial(with_level_rate, index=index)))
    quantities.append((_STRAGGLERS, with_steadiness))
    disturbed = [each for each in observations if _is_disturbed(each, _sized(cluster, each))]
    found, evidence = cluster, dict[str, _Evidence]()
    for quantity, with_rate in quantities:
        told = _evidence(quantity, found, observations, disturbed)
        if told is not None:
            found, evidence[quantity.name] = _corrected(found, with_rate, quantity, told), told
    corrections = tuple(
        _correction(quantity, evidence[quantity.name], observations, cluster, found)
        for quantity, _ in sorted(quantities, key=lambda each: each[0] is not _OPTIMIZER)
        if quantity.name in evidence
    )
    return Calibration(_said(found, evidence, observations), corrections)


@dataclass(frozen=True, slots=True)
class _Quantity:
    """A quantity that is compared.

    Attributes:
        name: Name of the correction.
        measured: Function that gives its measured seconds in a run, one by one.
        predicted: Function that gives its predicted seconds, one by one, on a Cluster with as many devices as
            the run had ranks.
        spread: Function that gives the spread of the measured seconds, as a share of them.
    """

    name: str
    measured: Callable[[Observation, Cluster], Sequence[float]]
    predicted: Callable[[Observation, Cluster], Sequence[float]]
    spread: Callable[[Observation, Cluster], float]

    def is_measured(self, observation: Observation, cluster: Cluster) -> bool:
        """Return whether the run measured this quantity."""
        measured = self.measured(observation, cluster)
        return bool(measured) and min(measured) > 0

    def error(self, observation: Observation, cluster: Cluster) -> float:
        """Return the logarithm of the median of predicted over measured seconds."""
        measured = self.measured(observation, cluster)
        pairs = zip(self.predicted(observation, cluster), measured, strict=True)
        ratio = median(predicted / seconds for predicted, seconds in pairs)
        return math.log(ratio) if ratio > 0 else -math.inf


@dataclass(frozen=True, slots=True)
class _Evidence:
    """What runs tell of a quantity.

    Attributes:
        runs: The runs that count, each with its weight; the weights sum to 1.
        difference: Mean of their errors, before the correction.
        spread: Spread of that mean.
        corrected: Share of the difference to correct.
        reason: Why less than half of it is corrected.
    """

    runs: tuple[tuple[Observation, float], ...]
    difference: float
    spread: float
    corrected: float
    reason: str

    def error(self, quantity: _Quantity, cluster: Cluster) -> float:
        """Return the mean error of the predictions of these runs on a Cluster."""
        return sum(weight * quantity.error(run, _sized(cluster, run)) for run, weight in self.runs)


def _evidence(
    quantity: _Quantity,
    cluster: Cluster,
    observations: Iterable[Observation],
    disturbed: Sequence[Observation],
) -> _Evidence | None:
    """Return what runs tell of a quantity, but for those disturbed; None if none of them measured it."""
    measured = [each for each in observations if quantity.is_measured(each, _sized(cluster, each))]
    if not measured:
        return None
    reasons = [
        _beside(each) if each in disturbed else _useless(quantity, each, _sized(cluster, each))
        for each in measured
    ]
    runs = [run for run, reason in zip(measured, reasons, strict=True) if not reason]
    if not runs:
        return _Evidence((), 0.0, math.inf, 0.0, reasons[0])
    spreads = [quantity.spread(run, _sized(cluster, run)) for run in runs]
    weights = [1 / (spread**2 + _MODEL**2) for spread in spreads]
    weights = [weight / sum(weights) for weight in weights]
    spread = math.hypot(*(weight * each for weight, each in zip(weights, spreads, strict=True)))
    counted = tuple(zip(runs, weights, strict=True))
    difference = sum(weight * quantity.error(run, _sized(cluster, run)) for run, weight in counted)
    corrected = max(0.0, 1 - (spread / difference) ** 2) if spread else 1.0
    reason = f"steps vary by {spread:.1%}, and the difference is {abs(math.expm1(difference)):.1%}"
    return _Evidence(counted, difference, spread, corrected, "" if corrected >= 0.5 else reason)


def _useless(quantity: _Quantity, run: Observation, cluster: Cluster) -> str:
    """Return why a run tells nothing of a quantity; empty if it does."""
    if quantity is _STRAGGLERS and run.compute_spread > _UNSTEADY:
        return _beside(run)
    if math.isinf(quantity.spread(run, cluster)):
        return "too few steps, or too few with it, to see how much they vary"
    whole = run.compute + run.optimizer + run.stragglers
    if quantity in (_COMPUTE, _OPTIMIZER, _STRAGGLERS):
        share = sum(quantity.measured(run, cluster)) / whole
        if share < _LEAST_SECONDS:
            return f"it takes {share:.1%} of the measured seconds, too little to tell"
    return ""


def _is_disturbed(run: Observation, cluster: Cluster) -> bool:
    """Return whether other work beside a run may explain how far its compute is from the prediction."""
    if not _UNSTEADY < run.compute_spread < math.inf or not _COMPUTE.is_measured(run, cluster):
        return False
    return abs(_COMPUTE.error(run, cluster)) < _FAR * run.compute_spread


def _beside(run: Observation) -> str:
    return f"compute varies by {run.compute_spread:.1%} between steps or ranks, as beside other work"


def _said(found: Cluster, evidence: Mapping[str, _Evidence], observations: Sequence[Observation]) -> Cluster:
    """Return the Cluster that says that runs corrected it, if they tell the seconds of its compute."""
    told = evidence.get(_COMPUTE.name)
    if told is None or not told.runs or (told.corrected < 0.5 and told.spread > _STEADY):
        return found
    errors = []
    for run, _ in told.runs:
        sized = _sized(found, run)
        quantities = [each for each in (_COMPUTE, _OPTIMIZER) if each.is_measured(run, sized)]
        predicted = sum(sum(each.predicted(run, sized)) for each in quantities)
        errors.append(abs(predicted / sum(sum(each.measured(run, sized)) for each in quantities) - 1))
    error = min(_MOST_ERROR, max(fmean(errors), told.spread))
    devices = max(run.plan.ranks for run, _ in told.runs)
    return found.replace(calibrated=Calibrated(by="runs", devices=devices, error=error))


def _correction(
    quantity: _Quantity,
    told: _Evidence,
    observations: Iterable[Observation],
    before: Cluster,
    after: Cluster,
) -> Correction:
    measured = predicted = left = 0.0
    for each in observations:
        old, new = _sized(before, each), _sized(after, each)
        measured += sum(quantity.measured(each, old))
        predicted += sum(quantity.predicted(each, old))
        left += sum(quantity.predicted(each, new))
    return Correction(quantity.name, measured, predicted, left, told.spread, told.corrected, told.reason)


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
    share = straggler_share(plan, cluster)
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
    lambda run, cluster: run.optimizer_spread,
)
_COMPUTE = _Quantity(
    "compute",
    lambda run, cluster: [run.compute],
    lambda run, cluster: [_compute_seconds(run, cluster)],
    lambda run, cluster: run.compute_spread,
)
_STRAGGLERS = _Quantity(
    "stragglers",
    lambda run, cluster: [run.stragglers] if run.plan.pp == 1 and run.plan.ranks > 1 else [],
    lambda run, cluster: [_straggler_seconds(run, cluster)],
    lambda run, cluster: run.stragglers_spread,
)


def _transfers_over(index: int, name: str) -> _Quantity:
    """Make the quantity for the transfers whose innermost common level is this one."""

    def chosen(observation: Observation, cluster: Cluster) -> list[Transfer]:
        return [each for each in observation.transfers if _level_of(each, cluster) == index]

    return _Quantity(
        name,
        lambda run, cluster: [each.seconds for each in chosen(run, cluster)],
        lambda run, cluster: [_transfer_seconds(each, cluster) for each in chosen(run, cluster)],
        lambda run, cluster: median(each.spread for each in chosen(run, cluster)),
    )


def _level_of(transfer: Transfer, cluster: Cluster) -> int:
    """Return the index of the innermost level whose links join all of the group."""
    return joined_by(transfer.group, tuple(level.devices for level in cluster.levels))


def _transfer_seconds(transfer: Transfer, cluster: Cluster) -> float:
    if transfer.operation in SENDS:
        return message_seconds(transfer.nbytes, Boundary(0, transfer.group.stride, Group(1)), cluster)
    return collective_seconds(transfer.operation, transfer.nbytes, transfer.group, cluster)


def _corrected(cluster: Cluster, with_rate: _WithRate, quantity: _Quantity, told: _Evidence) -> Cluster:
    """Return the Cluster with one rate times the factor that takes its share off the mean error of the runs.

    Bisection finds the factor, between 1 / `_LIMIT` and `_LIMIT`.
    """
    if not told.corrected:
        return cluster
    left = (1 - told.corrected) * told.difference if told.corrected < 1 else 0.0
    low, high = -math.log(_LIMIT), math.log(_LIMIT)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if told.error(quantity, with_rate(cluster, math.exp(middle))) > left:
            low = middle
        else:
            high = middle
    return with_rate(cluster, math.exp((low + high) / 2))
