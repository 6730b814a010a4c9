"""Compare a training under a Plan with the training on one device.

Every tensor of the model's state, the losses of every rank, the evaluations of rank 0 (others may have its
running statistics after a resume) and the gradient's norms are compared. The difference of a tensor is given
as a share of its movement by training: a share of its size would hide a lost step. A tensor that does not
move on one device must keep every bit.

The bound: in fp32 sums are made in another order, which changes the last digits of gradients, and weights are
rounded whenever they are written, by a larger share of their movement. The differences of entries were at
most 2e-6; `FP32` is ten times that. In bf16 the reference gives the size of rounding: its distance from the
same training in fp32. A Plan may differ `MULTIPLE` times as much, since it may round at other places, such as
where a buffer of positions is added.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.testing.conformance.training import Training

__all__ = ["Outcome", "judge"]

FP32, BF16, MULTIPLE = 2e-5, 2**-8, 3.0
_ULP = torch.finfo(torch.float32).eps


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a Case.

    Attributes:
        kind: "agrees", "refused" or "failed".
        text: For a refused Case the error's name and its first line; for a failed one the cause.
        difference: The largest difference of a quantity, as a share of its bound.
    """

    kind: str
    text: str = ""
    difference: float = 0.0


def judge(trained: Training, reference: Training, exact: Training, start: dict[str, Tensor]) -> Outcome:
    """Compare a training with the one on one device.

    Args:
        trained: Training under a Plan, with the losses of all ranks.
        reference: Training on one device in the same precision.
        exact: Training on one device in fp32.
        start: The model's state before training.
    """
    if trained.state.keys() != reference.state.keys():
        names = sorted(trained.state.keys() ^ reference.state.keys())
        return Outcome("failed", f"the state has other names: {', '.join(names)}")
    is_rounded = reference is not exact
    shares = {}
    for name, wanted in reference.state.items():
        given = trained.state[name]
        if given.shape != wanted.shape:
            return Outcome("failed", f"{name} has the shape {tuple(given.shape)}")
        difference, bound = _compared(given, wanted, exact.state[name], start[name], is_rounded=is_rounded)
        shares[name] = difference / bound if difference == difference else float("inf")
    numbers = [
        ("a loss", trained.losses, reference.losses, exact.losses),
        ("an evaluation", trained.evaluated[:1], reference.evaluated[:1], exact.evaluated[:1]),
        ("a gradient norm", [trained.norms], [reference.norms], [exact.norms]),
    ]
    for name, *series in numbers:
        given, wanted, other = (torch.tensor(each, dtype=torch.float64) for each in series)
        difference, bound = _numbers(given, wanted, other, is_rounded=is_rounded)
        shares[name] = difference / bound if difference == difference else float("inf")
    worst = max(shares, key=lambda name: shares[name])
    if shares[worst] <= 1.0:
        return Outcome("agrees", difference=shares[worst])
    departing = [name for name, share in shares.items() if share > 1.0]
    return Outcome(
        "failed",
        f"{len(departing)} of {len(shares)} exceed their bounds, {worst} by {shares[worst]:.3g} times",
        shares[worst],
    )


def _compared(
    given: Tensor, wanted: Tensor, exact: Tensor, start: Tensor, *, is_rounded: bool
) -> tuple[float, float]:
    """Return a tensor's difference from the reference, and its bound, as shares of its movement."""
    if not wanted.is_floating_point() or torch.equal(wanted, start):
        return float(not torch.equal(given, wanted.to(given.dtype))), 0.5
    given, wanted, exact, start = (each.double() for each in (given, wanted, exact, start))
    moved = float((wanted - start).norm())
    written = 4 * _ULP * float(wanted.norm()) / moved
    bound = FP32 + written
    if is_rounded:
        bound = MULTIPLE * float((wanted - exact).norm()) / moved + BF16 + written
    return float((given - wanted).norm()) / moved, bound


def _numbers(given: Tensor, wanted: Tensor, exact: Tensor, *, is_rounded: bool) -> tuple[float, float]:
    scale = wanted.abs().clamp_min(torch.finfo(torch.float32).tiny)
    difference = ((given - wanted).abs() / scale).max()
    bound = MULTIPLE * float(((wanted - exact).abs() / scale).max()) + BF16 if is_rounded else FP32
    return float(difference), bound
