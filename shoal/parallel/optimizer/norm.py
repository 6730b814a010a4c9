"""The norm of the whole gradient, of which every rank has a part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from shoal.parallel.communication import Axis
from shoal.parallel.owned import Owned
from shoal.parallel.place import on_device


class GradientNorm(NamedTuple):
    """Norms of a gradient, on the device.

    Attributes:
        whole: Euclidean norm of the whole gradient, a scalar in fp64; equal on every rank.
        names: Names of the parameters of which this rank has a part with a gradient.
        parts: Euclidean norm of the gradient of each of these parts, `[names]`, fp64.
        sums: Sums over the ranks of the numbers that `measure_gradient` got beside the gradient, fp64.
    """

    whole: torch.Tensor
    names: Sequence[str]
    parts: torch.Tensor
    sums: torch.Tensor


def measure_gradient(
    owned: Sequence[Owned], parts: Axis, device: torch.device, beside: Sequence[float] = ()
) -> GradientNorm:
    """Return the norms of the gradient; all ranks call it together, and no host waits for its device.

    Args:
        owned: This rank's parts of the parameters.
        parts: The ranks that together hold one whole state.
        device: Device on which to sum.
        beside: Further numbers to sum over these ranks, in the same message.
    """
    graded = [(each, gradient) for each in owned if (gradient := each.gradient) is not None]
    norms = torch.zeros(0, dtype=torch.float64, device=device)
    if graded:
        norms = torch.stack(_norms(graded)).double()
    squares = norms.square()
    copies = tuple(each.family.copies for each, _ in graded)
    if max(copies, default=1) > 1:
        squares = squares / on_device(copies, device)
    total = squares.sum()
    sums = torch.stack([total, *(total.new_full((), number) for number in beside)])
    parts.all_reduce(sums, "gradient norm").wait()
    return GradientNorm(sums[0].sqrt(), [each.name for each, _ in graded], norms, sums[1:])


def _norms(graded: Sequence[tuple[Owned, torch.Tensor]]) -> list[torch.Tensor]:
    """Return the norm of each gradient; of those in files as they were when they were written."""
    known = [
        None if each.stored is None or (whole := each.parameter.grad) is None else each.stored.norm_of(whole)
        for each, _ in graded
    ]
    others = [gradient for (_, gradient), norm in zip(graded, known, strict=True) if norm is None]
    computed = iter(torch._foreach_norm(others) if others else ())
    return [next(computed) if norm is None else norm for norm in known]


def limit_gradients(owned: Sequence[Owned], norm: torch.Tensor, limit: float) -> None:
    """Scale this rank's part of the gradient down, if the whole gradient's norm is above `limit`."""
    gradients = [gradient for each in owned if (gradient := each.gradient) is not None]
    factor = (limit / norm).clamp(max=1.0)
    # This is one kernel only if the gradients and the factor have one dtype; otherwise one for each gradient.
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        of_dtype = [gradient for gradient in gradients if gradient.dtype == dtype]
        torch._foreach_mul_(of_dtype, factor.to(dtype))
