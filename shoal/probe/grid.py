"""Minimise a function of a few positive numbers, whose sizes may differ by orders of magnitude.

All steps are in logarithms. A coarse grid over the bounds gives the start. From there the search steps to the
best neighbour, including diagonals, since numbers may trade for one another. If no neighbour is better, the
step is halved, until it is a thousandth.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

_POINTS = 5  # points of the coarse grid, along each number
_SMALLEST_STEP = 1e-3  # of a logarithm: the relative error of the result

_Point = tuple[float, ...]


def least(of: Callable[[_Point], float], bounds: Sequence[tuple[float, float]]) -> _Point:
    """Return a point where the function is least, compared with its neighbours.

    Args:
        of: The function; it takes one number for each bound.
        bounds: Lowest and highest value of each number, above 0.
    """
    edges = [(math.log(low), math.log(high)) for low, high in bounds]

    def value(point: _Point) -> float:
        return of(tuple(map(math.exp, point)))

    axes = [[low + (high - low) * index / (_POINTS - 1) for index in range(_POINTS)] for low, high in edges]
    best = min(itertools.product(*axes), key=value)
    reached = value(best)
    step = max(high - low for low, high in edges) / (2 * _POINTS)
    while step >= _SMALLEST_STEP:
        nearest = min(_neighbours(best, step, edges), key=value)
        if (found := value(nearest)) < reached:
            best, reached = nearest, found
        else:
            step /= 2
    return tuple(map(math.exp, best))


def _neighbours(point: _Point, step: float, edges: Sequence[tuple[float, float]]) -> list[_Point]:
    moved = [
        {min(max(at + move, low), high) for move in (-step, 0.0, step)}
        for at, (low, high) in zip(point, edges, strict=True)
    ]
    return list(itertools.product(*moved))
