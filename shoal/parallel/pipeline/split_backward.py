"""Deferred gradients of weights: a backward in two halves, for zero-bubble schedules.

The backward of a product `y = x w` is two products: the gradient of `x`, for which the previous stage waits,
and the gradient of `w`, which nobody needs before the optimizer's step. `split_backward` computes the first
for a whole stage and keeps what the second needs: each layer's input and the gradient of its output. `run`
computes the second later (Qi et al. 2024, "Zero bubble pipeline parallelism", arXiv:2401.10241).

Only products are deferred, as most of the work is there: the layers given to `put_off_products`. Gradients of
norms and embeddings are computed in the first half. `run` is a backward of its own, so the hooks that detect
a complete gradient are called in it, layer by layer in backward's order, and each gradient is freed as soon
as it is added up.

Between the two halves, memory holds the operands of the deferred products: for each row `in + out` numbers,
or `in + sum(out_i)` if several products share one input:

    product                    rows of a micro-batch                               numbers for each
    linear layer               tokens                                              in + out
    gate and up, then down,    choices: tokens * experts_per_token less what a     2 hidden + 3 ffn
      of experts                 capacity drops; with ep those that arrived here
    router of experts          tokens; fp32 whatever the precision is              hidden + experts

A layer that defers its products hides its weights from autograd: a plain backward gives them no gradient.
Recompute runs once, in the first half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from shoal.errors import TrainingError
from shoal.models import Mixture
from shoal.models.attention import autocast_dtype
from shoal.models.grouped_matmul import ExpertProducts, Runs, expert_products, multiply_by_experts
from shoal.models.once_differentiable import once_differentiable

Compute = Callable[[], Sequence[Tensor | None]]
"""Computes the gradients of some weights, in their order."""


@final
class WeightGradients:
    """The deferred half of one stage's backward of one micro-batch."""

    def __init__(self) -> None:
        self._parts: list[tuple[Compute, *tuple[Tensor, ...]]] = []

    def add(self, compute: Compute, weights: Sequence[Tensor]) -> None:
        """Defer the computation of the gradients of these weights: parameters, or views of parameters."""
        self._parts.append((compute, *weights))

    def run(self) -> None:
        """Add the gradients to those of the parameters, as a backward does; call it once."""
        parts, self._parts = self._parts, []
        roots = []
        while parts:  # The engine takes the newest node first. Keep no reference here: it frees the parts.
            roots.append(_Later.apply(*parts.pop()))
        if roots:
            torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])


@final
class Deferral:
    """The collector of the weight gradients that a rank's layers defer during a backward.

    Attributes:
        is_on: Whether forwards get a backward that defers.
    """

    def __init__(self) -> None:
        self._open: WeightGradients | None = None
        self.is_on = True

    @contextmanager
    def off(self) -> Iterator[None]:
        """Defer nothing while it lasts: for a forward whose backward is to be a plain one."""
        before, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = before

    @contextmanager
    def collect(self) -> Iterator[WeightGradients]:
        """Collect the weights' gradients that backward defers, in the object that this yields."""
        assert self._open is None
        self._open = collected = WeightGradients()
        try:
            yield collected
        finally:
            self._open = None

    def put_off(self, compute: Compute, weights: Sequence[Tensor]) -> None:
        """Defer the gradients of a layer's weights; the layer's backward calls it instead of computing them.

        Raises:
            TrainingError: The backward is a plain one, in which the gradients would be lost.
        """
        if self._open is None:
            raise TrainingError("a backward of a stage began outside of `split_backward`")
        self._open.add(compute, weights)


def split_backward(
    deferral: Deferral, output: Tensor | GradientEdge | None, gradient: Tensor | None
) -> WeightGradients:
    """Run the first half of a stage's backward; afterwards the stage's input has its gradient.

    Args:
        deferral: The Deferral of the stage's layers.
        output: The stage's hidden state `[batch, seq, hidden]`, or its loss, or the edge of either; None if
            it depends on nothing that is trained.
        gradient: Gradient of the output; None for a loss.

    Returns:
        The second half, which computes the weights' gradients.
    """
    with deferral.collect() as weights:
        if output is not None:
            torch.autograd.backward(output, gradient)
    return weights


def put_off_products(module: nn.Module, deferral: Deferral) -> None:
    """Make the products of a module defer their weights' gradients.

    The products are: each `nn.Linear` whose `forward` is its class's own; each `Conv1D` of transformers;
    router and experts of each `Mixture`, laid over ranks or not; and the method `unembed` of a model whose
    head is its embedding's weight.
    """
    layers: list[Any] = list(module.modules())
    for layer in layers:
        if isinstance(layer, Mixture):
            _put_off_experts(layer, deferral)
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
    """Compute `F.linear`, with a backward that defers the gradients of weight and bias.

    Args:
        hidden: `[..., in]`.
        weight: `[out, in]`, a parameter or a view of one.
        bias: `[out]`, or None.
        deferral: The Deferral that collects the gradients.

    Returns:
        `[..., out]`. It is the plain product with a plain backward if autograd would not run this backward:
        the input needs no gradient, autocast is on, or the deferral is off.
    """
    if not _can_put_off(hidden, (weight,), deferral):
        return F.linear(hidden, weight, bias)
    result: Tensor = _DeferredLinear.apply(hidden, (weight, bias), deferral)
    return result


def deferred_experts(
    rows: Tensor, runs: Runs, weights: Sequence[Tensor], deferral: Deferral
) -> tuple[Tensor, ...]:
    """Compute `multiply_by_experts`, with a backward that defers the gradients of the weights.

    Args:
        rows: `[rows, in]`, sorted by expert.
        runs: How many rows each expert has.
        weights: `[experts, out_i, in]` each; those that are not trained get no gradient.
        deferral: The Deferral that collects the gradients.

    Returns:
        `[rows, out_i]` for each weight; computed as a plain product when `deferred_linear` would.
    """
    if not _can_put_off(rows, weights, deferral):
        return multiply_by_experts(rows, runs, weights)
    products = expert_products(rows, runs, weights)
    results: tuple[Tensor, ...] = _DeferredExperts.apply(rows, products, tuple(weights), deferral)
    return results


def _can_put_off(rows: Tensor, weights: Sequence[Tensor], deferral: Deferral) -> bool:
    if not deferral.is_on:
        return False
    trained = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    return trained and rows.requires_grad and autocast_dtype(rows) is None


def _put_off_experts(mixture: Any, deferral: Deferral) -> None:
    mixture.score = partial(deferred_linear, bias=None, deferral=deferral)
    mixture.compute = partial(mixture.compute, multiply=partial(deferred_experts, deferral=deferral))


def _linear_forward(layer: nn.Linear, deferral: Deferral, hidden: Tensor) -> Tensor:
    return deferred_linear(hidden, layer.weight, layer.bias, deferral)


def _transposed_forward(layer: Any, deferral: Deferral, hidden: Tensor) -> Tensor:
    return deferred_linear(hidden, layer.weight.t(), layer.bias, deferral)


def _unembed(model: Any, deferral: Deferral, hidden: Tensor) -> Tensor:
    return deferred_linear(hidden, model.embed.weight, None, deferral)


class _DeferredLinear(torch.autograd.Function):
    """Compute a linear layer. Weight and bias come in a tuple, which autograd does not look into.

    If they were inputs with a gradient of None, their hooks would be called in the first half as well.
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


class _DeferredExperts(torch.autograd.Function):
    """Compute experts. Weights come in a tuple, as in `_DeferredLinear`."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, products: ExpertProducts, weights: tuple[Tensor, ...], deferral: Deferral
    ) -> tuple[Tensor, ...]:
        ctx.products, ctx.weights, ctx.deferral = products, weights, deferral
        ctx.save_for_backward(rows)
        return tuple(products.results(rows, weight) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (rows,) = ctx.saved_tensors
        pairs = zip(gradients, ctx.weights, strict=True)
        needed, trained = zip(*(pair for pair in pairs if pair[1].requires_grad), strict=True)
        ctx.deferral.put_off(partial(_expert_gradients, needed, rows, ctx.products), trained)
        return ctx.products.rows_gradient(gradients, ctx.weights), None, None, None


def _expert_gradients(
    gradients: Sequence[Tensor], rows: Tensor, products: ExpertProducts
) -> tuple[Tensor, ...]:
    return tuple(products.weight_gradient(gradient, rows) for gradient in gradients)


class _Later(torch.autograd.Function):
    """A node behind some weights in a graph; computes their gradients when backward reaches it."""

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
