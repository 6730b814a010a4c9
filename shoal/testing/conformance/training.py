"""The steps of a training for a comparison, equal on one device and under a Plan.

There are three optimizer steps, each of two micro-batches a rank, with the gradient clipped; forwards without
gradients in evaluation mode before the second step and after the last; a save and a resume before the third.
In fp32 the optimizer is AdamW, with an `eps` as large as gradients are, so that a step follows its gradient
smoothly. In bf16 it is SGD with momentum: Adam would divide by gradients near zero, which rounding makes.

Before each forward torch's generator gets a seed of its own, so that dropout draws equal masks wherever the
micro-batch is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.models.task import rows

__all__ = [
    "CLIP",
    "EVALUATED_BEFORE",
    "MICRO_BATCHES",
    "RESUMED_BEFORE",
    "STEPS",
    "Training",
    "make_optimizer",
    "micro_batches",
    "seed_forward",
]

STEPS, MICRO_BATCHES = 3, 2
EVALUATED_BEFORE, RESUMED_BEFORE = (1, STEPS), 2
"""Numbers of steps, from 0."""

CLIP = 0.5
"""Largest norm of a gradient; those of the zoo are both above and below it."""


@dataclass(frozen=True, slots=True)
class Training:
    """The results of a training.

    Attributes:
        state: The model's `state_dict` at the end, with the running statistics of rank 0; on the CPU.
        losses: The mean loss of each step, by rank; `[ranks][STEPS]`.
        evaluated: The mean loss of each evaluation, by rank.
        norms: The norm of the whole gradient in each step, before it was clipped.
    """

    state: dict[str, Tensor]
    losses: list[list[float]]
    evaluated: list[list[float]]
    norms: list[float]


def make_optimizer(parameters: Iterable[nn.Parameter], precision: str) -> torch.optim.Optimizer:
    """Return the optimizer for a precision."""
    if precision == "fp32":
        return torch.optim.AdamW(parameters, lr=2e-2, eps=1e-2, weight_decay=0.1)
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


def micro_batches(batch: Any, size: int, rank: int, ranks: int) -> Iterator[Any]:
    """Yield the rows of a batch of `size` samples that a rank sees, forward by forward."""
    length = size // (ranks * MICRO_BATCHES)
    for number in range(rank * MICRO_BATCHES, (rank + 1) * MICRO_BATCHES):
        yield rows(batch, number * length, (number + 1) * length)


def seed_forward(step: int, rank: int, micro_batch: int) -> None:
    """Seed the random numbers of the next forward."""
    torch.manual_seed(step * 10_000 + rank * 100 + micro_batch)
