"""The products of tensor parallelism: linear layers whose matrix is split over the ranks of an axis.

A column product has the rows of `[out, in]` split (the columns in Megatron's transposed notation): every rank
computes some of the outputs from the whole input. A row product has `in` split: every rank computes a part of
each output's sum, and the ranks add their parts up. A column product followed by a row product therefore
needs one communication in forward, in the row product, and one in backward, in the column product
(Megatron-LM, Shoeybi et al. 2019, arXiv:1909.08053):

    communication        forward                          backward
    column product       none                             all-reduce of the input's gradient
    row product          all-reduce of the output         none

With sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198) each rank keeps a part of the sequence
between the two, and the all-reduce is split into its halves:

    column product       all-gather of the input          the same, and reduce-scatter of its gradient
    row product          reduce-scatter of the output     all-gather of the output's gradient

For backward, a column product keeps this rank's part of its input, not the gathered input. In backward the
second all-gather runs beside the product that gives the input's gradient, and the reduction of that gradient
runs beside the products that give the weights' gradients.

With `overlap` the communications that remain exposed are cut into one part for each rank, and run beside the
products (Wang et al. 2023, "Overlap communication with dependent computation via decomposition in large deep
learning models", ASPLOS). For an all-gather, parts go round the ring of ranks: while one travels, the product
of the previous one is computed. For a reduce-scatter, sums go round: a rank adds its own product to the
received sum, and computes the next product while that sum travels on; a rank adds to its own part last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.models.once_differentiable import once_differentiable
from shoal.parallel.communication import Axis, Pending, new_buffer
from shoal.parallel.pipeline.split_backward import Deferral
from shoal.parallel.tensor.vocabulary import cut, joined, new_parts, start_gather, start_reduce_scatter


def column_products(
    hidden: Tensor,
    weights: Sequence[Tensor],
    axis: Axis,
    *,
    sequence: bool,
    overlap: bool,
    biases: Sequence[Tensor | None] | None = None,
    deferral: Deferral | None = None,
    name: str = "column",
) -> tuple[Tensor, ...]:
    """Multiply one input by several matrices; each rank has some of the outputs of each.

    Args:
        hidden: `[batch, seq, in]`, equal on all ranks; with `sequence` this rank's `[batch, seq/size, in]`.
            Or `[tokens, in]`; then the result has no `batch` either.
        weights: This rank's `[out_i/size, in]` each, such as those of query, key and value.
        axis: The ranks that the outputs are split over.
        sequence: Whether `hidden` is a part of the sequence.
        overlap: Whether forward's all-gather runs beside the products, part by part.
        biases: This rank's `[out_i/size]` for each matrix; None for none.
        deferral: Collector of the gradients of weights and biases in backward; None to compute them in place.
        name: Name of the communications in the Timeline.

    Returns:
        `[batch, seq, out_i/size]` for each matrix.
    """
    offsets = [None] * len(weights) if biases is None else list(biases)
    if axis.size == 1:
        return tuple(F.linear(hidden, weight, bias) for weight, bias in zip(weights, offsets, strict=True))
    if hidden.dim() == 2:  # the tokens of all samples in a row: each is multiplied by itself
        named: dict[str, Any] = {"sequence": sequence, "overlap": overlap, "deferral": deferral, "name": name}
        rows = column_products(hidden[None], weights, axis, biases=biases, **named)
        return tuple(result[0] for result in rows)
    split = _Split(axis, sequence, overlap, name)
    operands = [*weights, *offsets]
    if deferral is not None and _is_put_off(deferral, hidden):
        split, operands = _put_off(split, deferral, operands)
    results: tuple[Tensor, ...] = _applied(_ColumnProducts, split, hidden, operands)
    return results


def row_product(
    hidden: Tensor,
    weight: Tensor,
    axis: Axis,
    *,
    sequence: bool,
    overlap: bool,
    bias: Tensor | None = None,
    deferral: Deferral | None = None,
    name: str = "row",
) -> Tensor:
    """Multiply an input by a matrix, of which each rank has some of the inputs, and sum over the ranks.

    Args:
        hidden: This rank's `[batch, seq, in/size]`, or `[tokens, in/size]`.
        weight: This rank's `[out, in/size]`.
        axis: The ranks that the inputs are split over.
        sequence: Whether the result is a part of the sequence.
        overlap: Whether the communications run beside the products, part by part.
        bias: `[out]`, equal on all ranks; None for none. With `sequence` its gradient is this rank's part of
            the sum over the ranks, as for every parameter that sees a part of the sequence.
        deferral: Collector of the gradients of weight and bias in backward; None to compute them in place.
        name: Name of the communications in the Timeline.

    Returns:
        `[batch, seq, out]`, equal on all ranks; with `sequence` this rank's `[batch, seq/size, out]`.

    Raises:
        PlanError: With `sequence`, the sequence does not divide by the ranks.
    """
    if axis.size == 1:
        return F.linear(hidden, weight, bias)
    if hidden.dim() == 2:  # as in `column_products`
        named: dict[str, Any] = {"sequence": sequence, "overlap": overlap, "deferral": deferral, "name": name}
        return row_product(hidden[None], weight, axis, bias=bias, **named)[0]
    split, operands = _Split(axis, sequence, overlap, name), [weight, bias]
    if deferral is not None and _is_put_off(deferral, hidden):
        split, operands = _put_off(split, deferral, operands)
    result: Tensor = _applied(_RowProduct, split, hidden, operands)
    return result


@dataclass(frozen=True, slots=True)
class _Split:
    """The way in which one product is split: the arguments of the public functions."""

    axis: Axis
    sequence: bool
    overlap: bool
    name: str
    deferral: Deferral | None = None
    trained: tuple[Tensor, ...] = ()  # parameters that get gradients from the deferral


def _put_off(
    split: _Split, deferral: Deferral, operands: Sequence[Tensor | None]
) -> tuple[_Split, list[Tensor | None]]:
    """Hide weights and biases from autograd, which would call their hooks without a gradient."""
    present = tuple(each for each in operands if each is not None)
    if not all(each.requires_grad for each in present):
        return split, list(operands)
    hidden = [None if each is None else each.detach() for each in operands]
    return replace(split, deferral=deferral, trained=present), hidden


def _is_put_off(deferral: Deferral, hidden: Tensor) -> bool:
    """Return whether a deferral computes gradients later; not those of weights that autocast narrows."""
    return deferral.is_on and hidden.requires_grad and not torch.is_autocast_enabled(hidden.device.type)


def _applied(product: Any, split: _Split, hidden: Tensor, operands: Sequence[Tensor | None]) -> Any:
    """Return a product in the type that autocast gives `F.linear`, in backward too."""
    device = hidden.device.type
    if not torch.is_autocast_enabled(device):
        return product.apply(split, hidden, *operands)
    dtype = torch.get_autocast_dtype(device)
    narrow = [None if each is None else each.to(dtype) for each in operands]
    with torch.autocast(device, enabled=False):
        return product.apply(split, hidden.to(dtype), *narrow)


class _ColumnProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, split: _Split, hidden: Tensor, *operands: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = operands[: len(operands) // 2], operands[len(operands) // 2 :]
        ctx.split = split
        ctx.biased = [bias is not None for bias in biases]
        ctx.save_for_backward(hidden, *weights)
        pairs = [(weight, bias) for weight, bias in zip(weights, biases, strict=True) if weight is not None]
        if split.sequence and split.overlap:
            return _products_of_arriving(hidden, pairs, split)
        ((whole, _),) = _gathered(hidden, split)
        return tuple(F.linear(whole, weight, bias) for weight, bias in pairs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        split: _Split = ctx.split
        axis = split.axis
        hidden, *weights = ctx.saved_tensors
        _, needs_hidden, *needs = ctx.needs_input_grad
        needs_weight, needs_bias = needs[: len(weights)], needs[len(weights) :]
        # In part order all tensors below are contiguous; a sum over rows does not depend on their order.
        if split.sequence:
            rows = [cut(gradient, axis).flatten(0, 2) for gradient in gradients]
        else:
            rows = [gradient.flatten(0, 1) for gradient in gradients]
        whole, gathering = hidden, None
        if split.sequence and any(needs_weight):
            whole, gathering = start_gather(hidden, axis, split.name)
        hidden_gradient, reducing = None, None
        if needs_hidden:
            shape = (axis.size, *hidden.shape) if split.sequence else hidden.shape
            hidden_gradient = _new_buffer(torch.Size(shape), hidden)
            sums = hidden_gradient.view(-1, hidden.shape[-1])
            torch.mm(rows[0], weights[0], out=sums)
            for row, weight in zip(rows[1:], weights[1:], strict=True):
                sums.addmm_(row, weight)
        if gathering is not None:
            gathering.wait()
        if hidden_gradient is not None and split.sequence:
            hidden_gradient, reducing = start_reduce_scatter(hidden_gradient, axis, split.name)
        elif hidden_gradient is not None:
            reducing = axis.all_reduce(hidden_gradient, split.name)
        inputs = whole.reshape(-1, whole.shape[-1])
        weight_gradients = [
            row.t().mm(inputs) if needed else None for row, needed in zip(rows, needs_weight, strict=True)
        ]
        bias_gradients = [
            row.sum(0) if needed else None for row, needed in zip(rows, needs_bias, strict=True)
        ]
        if split.deferral is not None:
            split.deferral.put_off(partial(_column_gradients, split, hidden, rows, ctx.biased), split.trained)
        if reducing is not None:
            reducing.wait()
        return None, hidden_gradient, *weight_gradients, *bias_gradients


class _RowProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, split: _Split, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.split = split
        ctx.save_for_backward(hidden, weight)
        if split.sequence and split.overlap:
            result = _scattered_round_the_ring(hidden, weight, split)
        elif split.sequence:
            result = _scattered(hidden, weight, split)
        else:
            result = _all_reduced(hidden, weight, split)
        return result if bias is None else result.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        _, needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad
        hidden_gradient = torch.empty_like(hidden) if needs_hidden else None
        bias_gradient = gradient.sum((0, 1)) if needs_bias else None
        weight_gradient = None
        later = []
        for part, positions in _gathered(gradient, ctx.split):
            rows = part.flatten(0, 1)
            if ctx.split.deferral is not None:
                later.append((rows, hidden[:, positions]))
            if hidden_gradient is not None:
                _multiply(rows, weight, out=hidden_gradient[:, positions])
            if needs_weight:
                weight_gradient = _add_product(weight_gradient, rows.t(), hidden[:, positions].flatten(0, 1))
        if ctx.split.deferral is not None:
            ctx.split.deferral.put_off(
                partial(_row_gradients, gradient, later, ctx.split.trained), ctx.split.trained
            )
        return None, hidden_gradient, weight_gradient, bias_gradient


def _column_gradients(
    split: _Split, hidden: Tensor, rows: Sequence[Tensor], biased: Sequence[bool]
) -> list[Tensor]:
    """Return gradients of the weights, then of the biases; gathers an input that is a part of a sequence."""
    whole = hidden
    if split.sequence:
        whole, gathering = start_gather(hidden, split.axis, split.name)
        gathering.wait()
    inputs = whole.reshape(-1, whole.shape[-1])
    sums = [row.sum(0) for row, has_bias in zip(rows, biased, strict=True) if has_bias]
    return [row.t().mm(inputs) for row in rows] + sums


def _row_gradients(
    gradient: Tensor, parts: Sequence[tuple[Tensor, Tensor]], trained: Sequence[Tensor]
) -> list[Tensor]:
    """Return gradients of the weight, and of the bias if there is one."""
    total = None
    for rows, hidden in parts:
        total = _add_product(total, rows.t(), hidden.flatten(0, 1))
    assert total is not None
    return [total, gradient.sum((0, 1))][: len(trained)]


def _gathered(part: Tensor, split: _Split) -> Iterator[tuple[Tensor, slice]]:
    """Yield parts of the whole sequence as they arrive from the ranks, each with its positions.

    With overlap the next part travels while the caller computes with the present one. Without overlap, or if
    there are no parts, the whole sequence comes at once.
    """
    axis = split.axis
    if not split.sequence:
        yield part, slice(None)
        return
    if not split.overlap:
        parts, pending = start_gather(part, axis, split.name)
        pending.wait()
        yield joined(parts), slice(None)
        return
    length = part.shape[1]
    present = part.contiguous()
    for step in range(axis.size):
        owner = (axis.index - step) % axis.size
        coming = present
        travelling: Pending | None = None
        if step + 1 < axis.size:
            coming = _new_buffer(present.shape, present)
            travelling = axis.shift(coming, present, split.name)
        yield present, slice(owner * length, (owner + 1) * length)
        if travelling is not None:
            travelling.wait()
        present = coming


def _products_of_arriving(
    hidden: Tensor, pairs: Sequence[tuple[Tensor, Tensor | None]], split: _Split
) -> tuple[Tensor, ...]:
    """Return `[batch, seq, out_i/size]` for each matrix and bias, computed part by part."""
    batch, length, _ = hidden.shape
    results = [hidden.new_empty(batch, split.axis.size * length, weight.shape[0]) for weight, _ in pairs]
    for part, positions in _gathered(hidden, split):
        rows = part.flatten(0, 1)
        for result, (weight, _) in zip(results, pairs, strict=True):
            _multiply(rows, weight.t(), out=result[:, positions])
    for result, (_, bias) in zip(results, pairs, strict=True):
        if bias is not None:
            result.add_(bias)
    return tuple(results)


def _all_reduced(hidden: Tensor, weight: Tensor, split: _Split) -> Tensor:
    """Return `[batch, seq, out]`; with overlap, rows are reduced while the next rows' product is computed."""
    result = _new_buffer(torch.Size((*hidden.shape[:-1], weight.shape[0])), hidden)
    chunks = split.axis.size if split.overlap else 1
    reducing = []
    every = zip(hidden.flatten(0, 1).chunk(chunks), result.flatten(0, 1).chunk(chunks), strict=True)
    for rows, sums in every:
        torch.mm(rows, weight.t(), out=sums)
        reducing.append(split.axis.all_reduce(sums, split.name))
    for pending in reducing:
        pending.wait()
    return result


def _scattered(hidden: Tensor, weight: Tensor, split: _Split) -> Tensor:
    """Return `[batch, seq/size, out]`: compute the whole product, then one reduce-scatter."""
    pieces = cut(hidden, split.axis)
    products = new_parts(split.axis, torch.Size((*pieces.shape[1:-1], weight.shape[0])), hidden)
    _multiply(pieces.flatten(0, 2), weight.t(), out=products)
    result, pending = start_reduce_scatter(products, split.axis, split.name)
    pending.wait()
    return result


def _scattered_round_the_ring(hidden: Tensor, weight: Tensor, split: _Split) -> Tensor:
    """Return `[batch, seq/size, out]`: the sum of part i starts at rank i + 1 and ends at rank i."""
    axis = split.axis
    pieces = cut(hidden, axis)
    shape = torch.Size((*pieces.shape[1:-1], weight.shape[0]))
    total = coming = hidden.new_empty(0)
    pending: Pending | None = None
    for step in range(1, axis.size + 1):
        piece = pieces[(axis.index - step) % axis.size]
        here = step == axis.size  # the last sum needs its own memory, not a buffer that peers can reach
        total = hidden.new_empty(shape) if here else _new_buffer(shape, hidden)
        _multiply(piece.flatten(0, 1), weight.t(), out=total)
        if pending is not None:
            pending.wait()
            total.add_(coming)
        if not here:
            coming = _new_buffer(shape, hidden)
            pending = axis.shift(coming, total, split.name)
    return total


def _multiply(rows: Tensor, matrix: Tensor, *, out: Tensor) -> None:
    """Write the product `[rows, n]` to `out` `[..., n]`, which need not be contiguous."""
    if out.is_contiguous():
        torch.mm(rows, matrix, out=out.view(-1, out.shape[-1]))
    else:
        out.copy_(rows.mm(matrix).view(out.shape))


def _add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    return left.mm(right) if total is None else total.addmm_(left, right)


def _new_buffer(shape: torch.Size, like: Tensor) -> Tensor:
    return new_buffer(shape.numel(), dtype=like.dtype, device=like.device).view(shape)
