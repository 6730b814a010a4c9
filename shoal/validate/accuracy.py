"""The accuracy of predictions: the error of one, and statistics over many."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, quantiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One quantity, measured and predicted.

    Attributes:
        line: Line of the table.
        family: Family of the row.
        name: The thing measured, such as a model on so many devices.
        quantity: "step", "memory", "forward", "backward", or a collective.
        plan: The Plan of the prediction, if it has one; the best one if the row leaves some settings open.
        measured: Measured seconds, or bytes of memory.
        predicted: Predicted seconds, or bytes of memory.
        fitted: Whether constants may have been fitted to the row.
    """

    line: int
    family: str
    name: str
    quantity: str
    plan: str = ""
    measured: float
    predicted: float
    fitted: bool

    @property
    def error(self) -> float:
        """Error relative to the measurement: above 0 if the prediction is too large."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Errors of several predictions, as shares of the measurements.

    Attributes:
        rows: Number of predictions.
        median: Median of the absolute errors.
        mean: Mean of the absolute errors.
        ninth_decile: The value that nine in ten absolute errors are below.
        bias: Mean of the errors with their signs.
    """

    rows: int
    median: float
    mean: float
    ninth_decile: float
    bias: float


def accuracy_of(comparisons: Iterable[Comparison]) -> Accuracy | None:
    """Return the accuracy of these predictions; None if there are none."""
    errors = [each.error for each in comparisons]
    if not errors:
        return None
    absolute = sorted(map(abs, errors))
    return Accuracy(
        rows=len(errors),
        median=median(absolute),
        mean=fmean(absolute),
        ninth_decile=_ninth_decile(absolute),
        bias=fmean(errors),
    )


def _ninth_decile(values: Sequence[float]) -> float:
    """Return the ninth decile, by linear interpolation between the values, as numpy does."""
    return quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else values[0]
