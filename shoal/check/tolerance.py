"""How far two trainings may lie apart if only their rounding differs, measured on one device.

The reference is one device that computes in the Plan's precision and sees each batch as one micro-batch. The
same training is made again in other ways that differ from it by rounding alone: in smaller micro-batches with
the samples moved round, so that every sum over samples is made in another order, and in a type of twice the
width. What lies as far from the reference as these do is explained by rounding. A Plan may lie `MULTIPLE`
times as far, and `FLOOR` units in the last place: the other ways are few, and a Plan cuts sums that they do
not, such as those inside a matrix product.

A Task may compute something else for samples that come in other micro-batches, as batch normalization does.
Then every way sees the micro-batches that the Plan makes, and adds them in another order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from shoal.check.reference import Reference, Step, Sums, Tensors
from shoal.check.task_trial import AnyTrial

__all__ = [
    "FLOOR",
    "MULTIPLE",
    "TYPES",
    "Bounds",
    "Tolerance",
    "bound_of",
    "relative",
    "scales_of",
    "vector_deviation",
]

MULTIPLE = 5.0
"""Data-parallel Plans of 25 seeds, in fp32 and bf16, lay at most 1.5 times as far as the other ways."""

FLOOR = 8.0
"""Units in the last place of fp32, in which losses and the optimizer's state are kept."""

TYPES: Mapping[str, tuple[torch.dtype, torch.dtype]] = {
    "fp32": (torch.float32, torch.float64),
    "bf16": (torch.bfloat16, torch.float32),
}
"""By a Plan's precision, the type that computes and one of twice the width."""

_ULP = torch.finfo(torch.float32).eps


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest relative deviations of one step that rounding explains.

    Attributes:
        loss: Of the loss.
        norm: Of the gradient's norm.
        gradients: Of each parameter's gradient.
        parameters: Of each parameter.
    """

    loss: float
    norm: float
    gradients: dict[str, float]
    parameters: dict[str, float]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The reference, and how far from it rounding leads.

    Attributes:
        steps: The reference.
        bounds: Of each of its steps.
    """

    steps: list[Step]
    bounds: list[Bounds]

    @classmethod
    def measure(
        cls, trial: AnyTrial, precision: str, device: torch.device, microbatch: int | None = None
    ) -> Tolerance:
        """Trains on one device, once as the reference and then in the other ways.

        Args:
            trial: What is trained.
            precision: Of the Plans that are to be compared: fp32 or bf16.
            device: Where.
            microbatch: Samples of a micro-batch, if all ways are to see the same micro-batches.
        """
        compute, wider = TYPES[precision]
        batch, single = trial.batch, torch.float32
        half = max(1, batch // 2)
        ways = [
            Sums(compute, single, 1, rotated=1 % batch),
            Sums(compute, single, half, rotated=half // 2),
        ]
        if microbatch is not None:
            ways = [Sums(compute, single, microbatch, rotated=microbatch % batch)]
        steps = Reference(trial, Sums(compute, single, microbatch or batch), device).run()
        others = [
            Reference(trial, sums, device).run() for sums in (*ways, Sums(wider, wider, microbatch or batch))
        ]
        return cls(steps, [_bounds(step, alike) for step, *alike in zip(steps, *others, strict=True)])


def _bounds(step: Step, others: Sequence[Step]) -> Bounds:
    gradient_scales, parameter_scales = scales_of(step.gradients), scales_of(step.parameters)
    return Bounds(
        loss=bound_of(_loss_deviation(other, step) for other in others),
        norm=bound_of(relative(other.norm, step.norm) for other in others),
        gradients={
            name: bound_of(
                vector_deviation(other.gradients[name], value, gradient_scales[name]) for other in others
            )
            for name, value in step.gradients.items()
        },
        parameters={
            name: bound_of(
                vector_deviation(other.parameters[name], value, parameter_scales[name]) for other in others
            )
            for name, value in step.parameters.items()
        },
    )


def _loss_deviation(other: Step, step: Step) -> float:
    """How far the loss lies, or would lie by chance if that of every token did so independently.

    A few means may lie near one another by luck, which those of their many summands cannot.
    """
    by_chance = float((other.losses - step.losses).norm()) / step.losses.numel()
    return max(relative(other.loss, step.loss), relative(step.loss + by_chance, step.loss))


def relative(value: float, reference: float) -> float:
    """The deviation of a number, as a share of the reference; infinite if it is not a number."""
    deviation = abs(value - reference) / max(abs(reference), torch.finfo(torch.float32).tiny)
    return deviation if deviation == deviation else float("inf")


def scales_of(tensors: Tensors) -> dict[str, float]:
    """The norm of each tensor, but no less than the last place of the norm of all of them together."""
    norms = {name: float(value.double().norm()) for name, value in tensors.items()}
    least = _ULP * sum(norm**2 for norm in norms.values()) ** 0.5
    return {name: max(norm, least, torch.finfo(torch.float32).tiny) for name, norm in norms.items()}


def vector_deviation(value: torch.Tensor, reference: torch.Tensor, scale: float) -> float:
    """The norm of a difference, as a share of `scale`; infinite if an element is missing."""
    deviation = float((value.double() - reference.double()).norm()) / scale
    return deviation if deviation == deviation else float("inf")


def bound_of(deviations: Iterable[float]) -> float:
    """How far a Plan may lie, of how far the other ways do."""
    return MULTIPLE * max(deviations) + FLOOR * _ULP
