"""The norm of the whole gradient, of which every rank has a part."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shoal.parallel.communication import Axis
from shoal.parallel.owned import Owned

__all__ = ["gradient_norm", "scale_gradients"]


def gradient_norm(owned: Sequence[Owned], parts: Axis, device: torch.device) -> float:
    """Return the Euclidean norm of the whole gradient; equal on every rank.

    Args:
        owned: This rank's parts of the parameters.
        parts: The ranks that together hold one whole state.
        device: Device on which to sum.
    """
    graded = [(each.gradient, each.family.copies) for each in owned if each.gradient is not None]
    squares = torch.zeros((), dtype=torch.float64, device=device)
    if graded:
        norms = torch._foreach_norm([gradient for gradient, _ in graded])
        each = torch.stack(list(norms)).double().square()
        copies = [number for _, number in graded]
        if max(copies) > 1:
            each /= torch.tensor(copies, device=device)
        squares = each.sum()
    parts.all_reduce(squares, "gradient norm").wait()
    return math.sqrt(squares.item())


def scale_gradients(owned: Sequence[Owned], factor: float) -> None:
    """Multiply this rank's part of the gradient by `factor`."""
    gradients = [each.gradient for each in owned if each.gradient is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)
