"""Which measurements are the device's, and which fits can be trusted.

An operation of a GPU that was timed with its start by the host (`Measurements.is_apart` is False) shows the
host's seconds if the device is quicker. The host's seconds vary by about two times between operations, so
operations that took less than `_HOST` times the quickest of their kind are left out.

A fit whose median error is larger than `DOUBTFUL` for a kind of operations is not written: the device keeps
the preset's values of those quantities. If no preset has the device, the fitted values stay, and the
description's source says that they are doubtful. A jitter or a noise above `_MUCH` is written, and told.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeVar

from shoal.cluster import Cluster, Device
from shoal.probe.measurements import AttentionTime, Measurement, Measurements, PassTime, ProductTime

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
