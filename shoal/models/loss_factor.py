"""The factor on a forward's mean loss, which the auxiliary losses of that forward are multiplied by too.

A loop divides the mean loss of a micro-batch by their number, after the model's forward. Backward reaches
that mean loss before it reaches the routers, so the gradient there is their factor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from shoal.errors import TrainingError


@final
class LossFactor:
    """The factor of one forward: the output carries it to `next_token_loss`, which notes it in backward.

    Args:
        divisor: Number that the factor is divided by.
        is_accumulating: Returns whether other backwards of the same step follow.
    """

    def __init__(self, divisor: float, is_accumulating: Callable[[], bool]) -> None:
        self._divisor = divisor
        self._is_accumulating = is_accumulating
        self._noted: Tensor | None = None

    def put_on(self, output: Any) -> Any:
        """Return a model's output that carries the factor to the loss."""
        if hasattr(output, "_replace"):  # a named tuple, such as SplitLogits
            return output._replace(loss_factor=self) if "loss_factor" in output._fields else output
        object.__setattr__(output, "loss_factor", self)  # works for a frozen object too
        return output

    def note(self, factor: Tensor) -> None:
        """Take note of the gradient of the mean loss."""
        self._noted = factor

    @property
    def value(self) -> float | Tensor:
        """The factor on the auxiliary losses.

        Raises:
            TrainingError: The loss is not `next_token_loss`, and nobody told the number of micro-batches.
        """
        if self._noted is None and self._is_accumulating():
            raise TrainingError(
                "several micro-batches of a model with routers make a step, and nothing says by which factor "
                "its auxiliary losses are multiplied: call set_micro_batches(number) of the parallelized "
                "model before, or use shoal.models.next_token_loss, whose factor they take over"
            )
        return (1.0 if self._noted is None else self._noted) / self._divisor


def noted(loss: Tensor, output: object) -> Tensor:
    """Return the mean loss of an output; its backward notes the factor, if the output carries one."""
    factor = getattr(output, "loss_factor", None)
    if factor is None or not loss.requires_grad:
        return loss
    result: Tensor = _Note.apply(loss, factor)
    return result


class _Note(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, factor: LossFactor) -> Tensor:
        ctx.factor = factor
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.factor.note(gradient.detach())
        return gradient, None
