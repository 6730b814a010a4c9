"""How near predictions come to measurements: single errors, and what they are over many rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, quantiles

__all__ = ["Accuracy", "Comparison", "accuracy_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One quantity, measured and predicted.

    Attributes:
        line: Of the table.
        family: Of the row.
        name: What was measured, such as a model on so many devices.
        quantity: "step", "memory", "forward", "backward", or a collective.
        plan: What the prediction is for, where it is for a Plan; the best one where the row leaves some open.
        measured: In seconds, or of memory in bytes.
        predicted: The same.
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
        """Error of the prediction over what was measured: above 0 if it was predicted too long."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Errors of some predictions, as shares of what was measured.

    Attributes:
        rows: How many.
        median: Of the absolute errors.
        mean: Of the absolute errors.
        ninth_decile: What nine in ten absolute errors are below.
        bias: Mean of the errors with their signs.
    """

    rows: int
    median: float
    mean: float
    ninth_decile: float
    bias: float


def accuracy_of(comparisons: Iterable[Comparison]) -> Accuracy | None:
    """The errors of some predictions together; None if there are none."""
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
    """By linear interpolation between the values, as numpy does."""
    return quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else values[0]
