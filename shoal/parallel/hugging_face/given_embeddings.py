"""The gradient of embeddings that a caller makes, of models whose residual stream is split.

Each rank uses its part of `inputs_embeds`, so its backward gives the gradient of this part, and zeros. The
caller needs all of it, as for prompts that are trained, or for an attack on inputs. Embeddings that are made
within the model need no sum: gradients of its parameters are added up over the ranks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.models.once_differentiable import once_differentiable
from shoal.parallel.communication import Axis


def sum_gradients_of_embeddings(model: nn.Module, axis: Axis) -> None:
    """Give `inputs_embeds`, where a caller gives them to the model, their gradient over all ranks."""
    model.register_forward_pre_hook(partial(_summed, axis=axis), with_kwargs=True)


def _summed(
    module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], *, axis: Axis
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    embeds = named.get("inputs_embeds")
    if embeds is None or not embeds.requires_grad:
        return args, named
    return args, {**named, "inputs_embeds": _SumGradients.apply(embeds, axis)}


class _SumGradients(torch.autograd.Function):
    """A tensor that ranks have alike and use parts of; backward adds up their gradients."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        ctx.axis.all_reduce(total, "inputs_embeds").wait()
        return total, None
