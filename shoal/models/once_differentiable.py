"""Second derivatives through Functions that have none end with a named error."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ModelError


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a Function's backward whose own gradients are not known, in place of torch's decorator.

    With `create_graph=True` every gradient that it returns raises a `ModelError` when somebody differentiates
    it. Torch's decorator marks none if no gradient that comes in requires gradients, as those of a sum. Then
    what the tensors that were saved, such as weights, add to second derivatives is left out in silence.
    """
    name = backward.__qualname__.split(".")[-2].strip("_")

    @functools.wraps(backward)
    def once(ctx: Any, *gradients: Any) -> Any:
        with torch.no_grad():
            returned = backward(ctx, *gradients)
        if not torch.is_grad_enabled():
            return returned
        read = [each for each in (*gradients, *ctx.saved_tensors) if each is not None and each.requires_grad]
        if isinstance(returned, tuple):
            return tuple(_refused(each, name, read) for each in returned)
        return _refused(returned, name, read)

    return once


def _refused(gradient: Tensor | None, name: str, read: list[Tensor]) -> Tensor | None:
    """Return a gradient as a result of the tensors that backward read; to differentiate it is an error."""
    if gradient is None or not read:
        return gradient
    result: Tensor = _Refused.apply(name, gradient, *read)
    return result


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, gradient: Tensor, *read: Tensor) -> Tensor:
        ctx.name = name
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise ModelError(
            f"a gradient was differentiated again, as a gradient penalty does, and {ctx.name} has no second "
            "derivative",
            possible="second derivatives under dp with any shard=, of models without Shoal's experts, and of "
            "losses that torch computes",
            change="use a Plan without tp, cp, ep and pp, or leave out create_graph=True",
        )
