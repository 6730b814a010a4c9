"""Gradients of weights that are put off: a backward in two halves, for zero-bubble schedules.

The backward of a product `y = x w` is two products: the gradient of `x`, for which the stage before waits,
and that of `w`, which nobody needs before the optimizer's step. `split_backward` computes the first for a
whole stage and keeps what the second needs, which is each layer's input and the gradient of its output; `run`
computes the second later (Qi et al. 2024, "Zero bubble pipeline parallelism", arXiv:2401.10241).

Only products are put off, which is where the work is: the layers given to `put_off_products`. Gradients of
norms and embeddings are computed in the first half. `run` is a backward of its own, so the hooks that find a
gradient complete are called in it, layer by layer in backward's order, and each gradient is freed as soon as
it is added up.

A layer that puts its products off hides its weights from autograd: a plain backward gives them no gradient.
Recompute is done once, in the first half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge

from shoal.errors import TrainingError

__all__ = ["Deferral", "WeightGradients", "deferred_linear", "put_off_products", "split_backward"]

Compute = Callable[[], Sequence[Tensor | None]]
"""Computes the gradients of some weights, in their order."""


@final
class WeightGradients:
    """The half of one stage's backward of one micro-batch that was put off."""

    def __init__(self) -> None:
        self._parts: list[tuple[Compute, *tuple[Tensor, ...]]] = []

    def add(self, compute: Compute, weights: Sequence[Tensor]) -> None:
        """Puts off what gives the gradients of these weights, parameters or views of such."""
        self._parts.append((compute, *weights))

    def run(self) -> None:
        """Adds the gradients to those of the parameters, as a backward does; to be called once."""
        parts, self._parts = self._parts, []
        roots = []
        while parts:  # The engine takes the newest node first. Nothing here keeps what it is to free.
            roots.append(_Later.apply(*parts.pop()))
        if roots:
            torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])


@final
class Deferral:
    """Where the layers of a rank leave their weights' gradients while a backward runs."""

    def __init__(self) -> None:
        self._open: WeightGradients | None = None

    @contextmanager
    def collect(self) -> Iterator[WeightGradients]:
        """Within it, backward leaves the weights' gradients in what this gives."""
        assert self._open is None
        self._open = collected = WeightGradients()
        try:
            yield collected
        finally:
            self._open = None

    def put_off(self, compute: Compute, weights: Sequence[Tensor]) -> None:
        """Called in a layer's backward in place of computing the gradients of its weights.

        Raises:
            TrainingError: The backward is a plain one, in which they would be lost.
        """
        if self._open is None:
            raise TrainingError("a backward of a stage began outside of `split_backward`")
        self._open.add(compute, weights)


def split_backward(
    deferral: Deferral, output: Tensor | GradientEdge | None, gradient: Tensor | None
) -> WeightGradients:
    """The first half of a stage's backward, after which the stage's input has its gradient.

    Args:
        deferral: What the stage's layers were given to.
        output: The stage's hidden state `[batch, seq, hidden]`, or its loss, or the edge of either; None if
            it depends on nothing that is trained.
        gradient: Of the output; None for a loss.

    Returns:
        What gives the weights their gradients.
    """
    with deferral.collect() as weights:
        if output is not None:
            torch.autograd.backward(output, gradient)
    return weights


def put_off_products(module: nn.Module, deferral: Deferral) -> None:
    """Makes the linear layers of a module leave their weights' gradients to a deferral.

    That is each `nn.Linear` whose `forward` is its class's own, each `Conv1D` of transformers, and the method
    `unembed` of a model whose head is its embedding's weight.
    """
    layers: list[Any] = list(module.modules())
    for layer in layers:
        if "forward" in vars(layer):
            continue  # split over ranks, or wrapped: its forward is not the plain product
        kind = type(layer)
        if kind is nn.Linear:
            layer.forward = partial(_linear_forward, layer, deferral)
        elif kind.__name__ == "Conv1D" and isinstance(getattr(layer, "nf", None), int):
            layer.forward = partial(_transposed_forward, layer, deferral)
    if getattr(module, "head", module) is None and "unembed" not in vars(module):
        model: Any = module
        model.unembed = partial(_unembed, model, deferral)


def deferred_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, deferral: Deferral) -> Tensor:
    """`F.linear`, whose backward leaves the gradients of weight and bias to a deferral.

    Args:
        hidden: `[..., in]`.
        weight: `[out, in]`, a parameter or a view of one.
        bias: `[out]`, or None.
        deferral: See above.

    Returns:
        `[..., out]`. Where autograd would not come by, as the input needs no gradient, and under autocast, it
        is the plain product with a plain backward.
    """
    trained = torch.is_grad_enabled() and weight.requires_grad
    if not (trained and hidden.requires_grad) or torch.is_autocast_enabled(hidden.device.type):
        return F.linear(hidden, weight, bias)
    result: Tensor = _DeferredLinear.apply(hidden, (weight, bias), deferral)
    return result


def _linear_forward(layer: nn.Linear, deferral: Deferral, hidden: Tensor) -> Tensor:
    return deferred_linear(hidden, layer.weight, layer.bias, deferral)


def _transposed_forward(layer: Any, deferral: Deferral, hidden: Tensor) -> Tensor:
    return deferred_linear(hidden, layer.weight.t(), layer.bias, deferral)


def _unembed(model: Any, deferral: Deferral, hidden: Tensor) -> Tensor:
    return deferred_linear(hidden, model.embed.weight, None, deferral)


class _DeferredLinear(torch.autograd.Function):
    """Weight and bias come in a tuple, which autograd does not look into.

    Were they inputs with a gradient of None, their hooks would be called in the first half as well.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, operands: tuple[Tensor, Tensor | None], deferral: Deferral
    ) -> Tensor:
        ctx.operands, ctx.deferral = operands, deferral
        ctx.save_for_backward(hidden)
        return F.linear(hidden, *operands)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (hidden,) = ctx.saved_tensors
        weight, bias = ctx.operands
        weights = (weight,) if bias is None else (weight, bias)
        ctx.deferral.put_off(partial(_linear_gradients, gradient, hidden, weights), weights)
        return gradient.matmul(weight), None, None


def _linear_gradients(
    gradient: Tensor, hidden: Tensor, weights: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    rows = gradient.flatten(0, -2)
    product = rows.t().mm(hidden.flatten(0, -2))
    if len(weights) == 1:
        return (product,)
    return product, rows.sum(0) if weights[1].requires_grad else None


class _Later(torch.autograd.Function):
    """Stands behind some weights in a graph, and computes their gradients when backward comes by."""

    @staticmethod
    def forward(ctx: Any, compute: Compute, *weights: Tensor) -> Tensor:
        ctx.compute = compute
        return weights[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        compute: Compute = ctx.compute
        ctx.compute = None  # frees what it holds before the next part is computed
        return None, *compute()
