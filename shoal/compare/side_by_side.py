"""The steps of two runs that trained at the same time: in turns, or each on devices of its own."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from statistics import median

_NEAR = 2.0
"""Steps after its own begin within which the partner of a step begins."""
_LEAST_SHARE = 0.9
"""Share of the steps of the run with fewer steps that must have a partner."""


def pairs(first: Sequence[float], second: Sequence[float]) -> list[tuple[int, int]]:
    """Return for each step of the run with fewer steps the next step that the other run began.

    The nearest step would not do: which one is nearest depends on how long steps take, so that the choice
    would change what is measured. The list is empty if less than nine tenths of the steps have a partner
    within two steps: then the runs were not side by side.

    Args:
        first: When the steps of one run began, in seconds, ascending.
        second: When those of the other began, on the same clock.

    Returns:
        Places in the two sequences, in order of time.
    """
    if len(first) > len(second):
        return [(one, other) for other, one in pairs(second, first)]
    if len(first) < 2:
        return []
    near = _NEAR * median(later - start for start, later in itertools.pairwise(first))
    found = [(place, bisect_left(second, start)) for place, start in enumerate(first)]
    found = [
        (one, other) for one, other in found if other < len(second) and second[other] - first[one] <= near
    ]
    return found if len(found) >= _LEAST_SHARE * len(first) else []
