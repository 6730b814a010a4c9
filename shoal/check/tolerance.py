"""Measures on one device how far two trainings may differ if only their rounding differs.

The reference is one device that computes in the Plan's precision and sees each batch as one micro-batch. The
same training then runs in other ways that differ from it by rounding alone: in smaller micro-batches with the
samples rotated, so that every sum over samples has another order; from first weights that are moved by less
than half a unit in the last place; and in a type of twice the width. Rounding inside a matrix product, whose
sums a Plan splits, has the effect of such a move, and a layer may make the effect a hundred times as large.
Rounding explains deviations from the reference as large as theirs. A Plan may deviate `MULTIPLE` times as
much, since the other ways are few, plus `FLOOR` units in the last place.

A Task may compute something else if its samples come in other micro-batches, as batch normalization does.
Then every way sees the micro-batches that the Plan makes, and adds them in another order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from shoal.check.reference import Reference, Step, Sums, Tensors
from shoal.check.task_trial import AnyTrial
from shoal.errors import ConfigError

MULTIPLE = 5.0
"""Factor on the other ways' deviation. Data-parallel Plans of 25 seeds, in fp32 and bf16, needed 1.5."""

FLOOR = 8.0
"""Units in the last place of fp32, the type of losses and of the optimizer's state."""

TYPES: Mapping[str, tuple[torch.dtype, torch.dtype]] = {
    "fp32": (torch.float32, torch.float64),
    "bf16": (torch.bfloat16, torch.float32),
}
"""By a Plan's precision: the type of the compute, and a type of twice the width."""

_ULP = torch.finfo(torch.float32).eps


def require_precision(precision: str) -> None:
    """Refuse a Plan's precision that the reference does not have.

    Raises:
        ConfigError: There is no bound for it.
    """
    if precision not in TYPES:
        raise ConfigError(
            f"precision={precision} was given, and the reference on one device does not compute in it",
            possible=" or ".join(TYPES),
            change="check the layout in one of these",
        )


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest relative deviations of one step that rounding explains.

    Attributes:
        loss: Bound for the loss.
        norm: Bound for the gradient's norm.
        gradients: Bound for each parameter's gradient.
        parameters: Bound for each parameter.
        buffers: Bound for each buffer of the first rank.
        evaluation: Bound for the loss in evaluation.
    """

    loss: float
    norm: float
    gradients: dict[str, float]
    parameters: dict[str, float]
    buffers: dict[str, float]
    evaluation: float


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The reference, and the bounds of deviations from it.

    Attributes:
        steps: Steps of the reference.
        bounds: Bounds for each step.
    """

    steps: list[Step]
    bounds: list[Bounds]

    @classmethod
    def measure(
        cls,
        trial: AnyTrial,
        precision: str,
        device: torch.device,
        microbatch: int | None = None,
        ranks: int = 1,
    ) -> Tolerance:
        """Train on one device, once as the reference and then in the other ways.

        Args:
            trial: The training to compare.
            precision: Precision of the Plans to compare: fp32 or bf16.
            device: The device that it runs on.
            microbatch: Samples of a micro-batch, if all ways are to see the same micro-batches.
            ranks: Ranks that the batch is divided over, if each is to have buffers of its own.
        """
        compute, wider = TYPES[precision]
        batch, single = trial.batch, torch.float32
        half = max(1, batch // 2)
        ways = [
            Sums(compute, single, 1, rotated=1 % batch),
            Sums(compute, single, half, rotated=half // 2),
        ]
        if microbatch is not None:
            # Of several ranks whole parts are rotated, so that each sees its micro-batches in their order.
            rotated = microbatch % batch if ranks == 1 else batch // ranks
            ways = [Sums(compute, single, microbatch, rotated=rotated, ranks=ranks)]
        size = microbatch or batch
        steps = Reference(trial, Sums(compute, single, size, ranks=ranks), device).run()
        ways += [Sums(compute, single, size, moved=True, ranks=ranks), Sums(wider, wider, size, ranks=ranks)]
        others = [Reference(trial, sums, device).run() for sums in ways]
        return cls(steps, [_bounds(step, alike) for step, *alike in zip(steps, *others, strict=True)])


def _bounds(step: Step, others: Sequence[Step]) -> Bounds:
    evaluated = [(other.evaluation, step.evaluation) for other in others]
    return Bounds(
        evaluation=bound_of(
            relative(one, two) if one is not None and two is not None else 0.0 for one, two in evaluated
        ),
        loss=bound_of(_loss_deviation(other, step) for other in others),
        norm=bound_of(relative(other.norm, step.norm) for other in others),
        gradients=_bounds_of_each(step.gradients, [other.gradients for other in others]),
        parameters=_bounds_of_each(step.parameters, [other.parameters for other in others]),
        buffers=_bounds_of_each(step.buffers, [other.buffers for other in others]),
    )


def _bounds_of_each(tensors: Tensors, others: Sequence[Tensors]) -> dict[str, float]:
    scales = scales_of(tensors)
    return {
        name: bound_of(vector_deviation(other[name], value, scales[name]) for other in others)
        for name, value in tensors.items()
    }


def _loss_deviation(other: Step, step: Step) -> float:
    """Return the loss's deviation, or that expected from independent deviations of tokens' losses if larger.

    A few means may agree by luck; the losses of many tokens cannot.
    """
    by_chance = float((other.losses - step.losses).norm()) / step.losses.numel()
    return max(relative(other.loss, step.loss), relative(step.loss + by_chance, step.loss))


def relative(value: float, reference: float) -> float:
    """Return the deviation of a number, as a share of the reference; infinite if it is not a number."""
    deviation = abs(value - reference) / max(abs(reference), torch.finfo(torch.float32).tiny)
    return deviation if deviation == deviation else float("inf")


def scales_of(tensors: Tensors) -> dict[str, float]:
    """Return the norm of each tensor, at least the last place of the norm of all tensors together."""
    norms = {name: float(value.double().norm()) for name, value in tensors.items()}
    least = _ULP * sum(norm**2 for norm in norms.values()) ** 0.5
    return {name: max(norm, least, torch.finfo(torch.float32).tiny) for name, norm in norms.items()}


def vector_deviation(value: torch.Tensor, reference: torch.Tensor, scale: float) -> float:
    """Return the norm of a difference, as a share of `scale`; infinite if an element is missing."""
    deviation = float((value.double() - reference.double()).norm()) / scale
    return deviation if deviation == deviation else float("inf")


def bound_of(deviations: Iterable[float]) -> float:
    """Return how far a Plan may deviate, from the deviations of the other ways."""
    return MULTIPLE * max(deviations) + FLOOR * _ULP
