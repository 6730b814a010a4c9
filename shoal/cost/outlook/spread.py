"""How much measured seconds vary: robust against a few slow steps, and not blind to many.

Other work on a machine only makes steps slower. A few slow steps change neither the median nor the median
absolute deviation. If most steps are slow, the median is a slow one, and the quick steps below it show that:
so the spread is the larger one of two estimates of the standard deviation, by the median absolute deviation
and by the tenth percentile, each with the factor that makes it right for normal times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median, pstdev, quantiles

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
