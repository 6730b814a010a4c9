"""Statistics of one value a step: robust, and aware that neighbouring steps are alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median

_MAD_TO_SIGMA = 1.4826  # of a normal distribution
_MIDMEAN_TO_MEAN = 1.09  # standard error of the middle half
_MOST_AUTOCORRELATION = 0.9
_SMALLEST_PERIOD = 2


def deviation(values: Sequence[float]) -> float:
    """Return the standard deviation, from the median distance to the median: outliers do not raise it."""
    middle = median(values)
    return _MAD_TO_SIGMA * median(abs(value - middle) for value in values)


def errors_from_zero(values: Sequence[float]) -> float:
    """Return the mean of the middle half in its standard errors.

    Neighbours that are alike count as fewer values.
    """
    alike = min(max(autocorrelation(values, 1), 0.0), _MOST_AUTOCORRELATION)
    count = len(values) * (1 - alike) / (1 + alike)
    error = _MIDMEAN_TO_MEAN * deviation(values) / math.sqrt(max(count, 1.0))
    quarter = len(values) // 4
    middle = fmean(sorted(values)[quarter : len(values) - quarter])
    return middle / error if error > 0 else math.copysign(math.inf, middle) if middle else 0.0


def autocorrelation(values: Sequence[float], lag: int) -> float:
    """Return the correlation of the values with those so many steps later; 0 for a constant."""
    mean = fmean(values)
    centred = [value - mean for value in values]
    whole = sum(value * value for value in centred)
    if whole <= 0 or lag >= len(values):
        return 0.0
    shared = sum(one * other for one, other in zip(centred, centred[lag:], strict=False))
    return shared / whole * len(values) / (len(values) - lag)


def best_period(values: Sequence[float]) -> tuple[int, float]:
    """Return the number of steps after which the values are most alike again, and the autocorrelation there.

    The smallest such number counts: after a multiple they are as alike.
    """
    lags = range(_SMALLEST_PERIOD, len(values) // 3 + 1)
    if not lags:
        return 0, 0.0
    found = {lag: autocorrelation(values, lag) for lag in lags}
    most = max(found.values())
    if most <= 0:
        return 0, 0.0
    period = next(lag for lag in lags if found[lag] >= 0.8 * most)
    return period, found[period]


def runs_of(positions: Sequence[int], *, gap: int = 0) -> list[list[int]]:
    """Return the runs of ascending positions that follow one another, with gaps of at most so many."""
    runs: list[list[int]] = []
    for position in positions:
        if runs and position - runs[-1][-1] <= 1 + gap:
            runs[-1].append(position)
        else:
            runs.append([position])
    return runs
