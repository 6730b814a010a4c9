"""Fits the seconds per step and per byte to measured times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.cost.collectives.algorithm import AlphaBeta

if TYPE_CHECKING:
    import numpy as np


def fit_alpha_beta(
    steps: Sequence[float], nbytes: Sequence[float], seconds: Sequence[float], known: Sequence[float]
) -> AlphaBeta:
    """Fit alpha and beta of seconds = alpha * steps + beta * nbytes + known.

    The fit has the least sum of squared relative errors. With absolute errors the largest buffers alone would
    decide, and alpha, which only small buffers show, would be noise. Neither alpha nor beta is below 0: where
    plain least squares make one negative, the best fit within bounds has one at 0 (the problem is convex).

    Args:
        steps: Steps of each measurement, [measurements].
        nbytes: Bytes on the path of each measurement, [measurements].
        seconds: Seconds that each measurement took, above 0, [measurements].
        known: Seconds of each measurement that are already explained, [measurements].
    """
    import numpy as np  # imported here, so that planning, which does not fit, starts without it

    weight = 1 / np.asarray(seconds)
    counts = np.stack([steps, nbytes], axis=1) * weight[:, None]
    wanted = 1 - np.asarray(known) * weight
    scale = np.maximum(counts.max(axis=0), np.finfo(float).tiny)  # bytes outnumber steps by far
    both = np.linalg.lstsq(counts / scale, wanted, rcond=None)[0] / scale
    if (both >= 0).all():
        return AlphaBeta(*both.tolist())
    edges = [AlphaBeta(_fit_one(counts[:, 0], wanted), 0.0), AlphaBeta(0.0, _fit_one(counts[:, 1], wanted))]
    return min(edges, key=lambda edge: float(((counts @ np.array(edge) - wanted) ** 2).sum()))


def _fit_one(counts: np.ndarray, wanted: np.ndarray) -> float:
    """Return the x >= 0 with the least sum of (counts * x - wanted)^2."""
    square = float(counts @ counts)
    return max(float(counts @ wanted) / square, 0.0) if square else 0.0
