"""Thin out a series so that no peak is lost: what a page gets of a million steps."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MOST_POINTS = 2000
"""Most points that one answer has of all its series together."""


def thinned(values: npt.NDArray[np.float64], most: int) -> npt.NDArray[np.int64]:
    """Return the positions to show, ascending: the least and the greatest value of equal stretches.

    The first and the last position are always among them. Values that are not finite count as gaps, and are
    left out.

    Args:
        values: The series, `[n]`.
        most: Most positions to return, 4 or more.
    """
    finite = np.flatnonzero(np.isfinite(values))
    if len(finite) <= most:
        return finite
    stretches = np.array_split(finite, (most - 2) // 2)
    chosen = {int(finite[0]), int(finite[-1])}
    for stretch in stretches:
        inside = values[stretch]
        chosen |= {int(stretch[inside.argmin()]), int(stretch[inside.argmax()])}
    return np.array(sorted(chosen), dtype=np.int64)
