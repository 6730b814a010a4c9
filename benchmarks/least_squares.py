"""Damped least squares for a few constants, by differences."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

__all__ = ["least_squares", "softened"]

_ROUNDS = 12


def softened(errors: np.ndarray, scale: float) -> np.ndarray:
    """Return errors whose squares grow with the error, not with its square, beyond a scale.

    Args:
        errors: Any errors.
        scale: Errors far below it stay as they are.
    """
    soft = 2 * (np.sqrt(1 + (errors / scale) ** 2) - 1)
    return np.asarray(scale * np.sqrt(soft) * np.sign(errors))


def least_squares(
    residuals: Callable[[np.ndarray], np.ndarray], start: np.ndarray, rounds: int = _ROUNDS
) -> np.ndarray:
    """Return the point at which the sum of squares is least, by Levenberg's and Marquardt's method.

    Args:
        residuals: Gives the residuals at a point.
        start: The first point, in units in which 1e-3 is a small step.
        rounds: Number of times that slopes are computed.
    """
    point, damping, width = start, 1e-2, 1e-3
    found = residuals(point)
    for _ in range(rounds):
        slopes = np.stack(
            [(residuals(point + width * unit) - found) / width for unit in np.eye(len(point))], axis=1
        )
        square = slopes.T @ slopes
        while damping < 1e6:
            scaled = square + damping * np.diag(np.diag(square) + 1e-9)
            tried = point - np.linalg.solve(scaled, slopes.T @ found)
            result = residuals(tried)
            if result @ result < found @ found:
                point, found, damping = tried, result, damping / 5
                break
            damping *= 5
    return point
