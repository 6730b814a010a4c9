"""Causal attention over a sequence spread over ranks: keys and values go round a ring.

Liu et al., "Ring Attention with Blockwise Transformers", arXiv:2310.01889. Each rank keeps its queries. A
rank sends keys and values on to the next rank while it attends to them, `cp - 1` times; the outputs of the
blocks are joined by their log-sum-exp. In backward keys and values go round again. Their gradients follow
them and end at the rank that the block came from: `cp - 1` times as well.

The sequence is cut as in `zigzag_positions`: rank i of n holds chunks i and 2n - 1 - i of 2n. A block from an
earlier rank has one chunk that every query here sees, and one that none sees; a block from a later rank is
seen only by the later queries, and they see all of it. Every step except the first is half a block, with
equal work on all ranks. No step needs a mask except the first, which is an ordinary causal block (balancing:
Brandon et al., "Striped Attention", arXiv:2311.09431).

Each rank sends `2 (cp - 1)` times the elements of its keys in forward, and `4 (cp - 1)` times in backward,
where gradients travel in fp32. In addition to its own part it holds two other parts of keys and values, and
in backward two of their gradients.

The forward is one operator to autograd and to recompute. So selective recompute keeps its two results, output
and log-sum-exp; it keeps no results of single blocks, and needs no second round of the ring.

Attention of one block of queries to one block of keys, with the log-sum-exp that joins blocks.

torch's fused kernels have operators that return the log-sum-exp of each row of scores together with the
output, and operators for backward that take both. A row's output over several blocks of keys is the mean of
its outputs, weighted by the exponentials of their log-sum-exps. A block's backward is correct if it gets the
output and log-sum-exp of the whole row (FlashAttention: Dao et al. 2022, arXiv:2205.14135; FlashAttention-2:
arXiv:2307.08691). If no kernel supports the device, dtype or head size, plain products are used.

Shapes, here and below: query and output `[batch, heads, queries, head_dim]`, key and value
`[batch, kv_heads, keys, head_dim]` where `kv_heads` divides `heads`, log-sum-exp `[batch, heads, queries]`.
Causal blocks are square. Log-sum-exp is fp32, or fp64 with fp64 inputs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

from shoal.models.attention import Documents, causal_attention, sees
from shoal.models.once_differentiable import once_differentiable
from shoal.parallel.communication import Axis, Pending
from shoal.parallel.context.positions import zigzag_positions
from shoal.parallel.weight_hooks import between_graphs

Operands = tuple[Tensor, Tensor, Tensor]
"""Query, key and value, or their gradients."""


class Kernel(ABC):
    """A way to compute the attention of a block."""

    @abstractmethod
    def forward(self, operands: Operands, *, causal: bool) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp of query, key and value."""

    @abstractmethod
    def backward(
        self, gradient: Tensor, operands: Operands, output: Tensor, logsumexp: Tensor, *, causal: bool
    ) -> Operands:
        """Return the gradients of query, key and value.

        Args:
            gradient: Gradient of the whole rows' output.
            operands: Query, key and value, as in forward.
            output: Output of the whole rows, over all blocks of keys.
            logsumexp: Log-sum-exp of the whole rows.
            causal: As given to forward.
        """


def kernel_for(operands: Operands, *, causal: bool, seen: Tensor | None = None) -> Kernel:
    """Return a kernel for this query, key and value: a fused one if there is one, otherwise `PlainProducts`.

    The fused ones take no mask `seen`. Any kernel's backward takes the results of any kernel's forward.
    """
    query, key, value = operands
    if seen is not None:
        return PlainProducts(seen=seen)
    if query.device.type == "cpu" and query.numel() and key.numel():
        return FlashOnCpu()
    if query.device.type == "cuda":
        parameters = SDPAParams(query, key, value, None, 0.0, causal, True)
        if can_use_flash_attention(parameters):
            return FlashOnCuda()
        key, value = (_repeat(each, query.shape[1]) for each in (key, value))
        if can_use_efficient_attention(SDPAParams(query, key, value, None, 0.0, causal, False)):
            return EfficientOnCuda()
    return PlainProducts()


@final
class FlashOnCpu(Kernel):
    """torch's own kernel for CPUs, of any dtype and head size."""

    def forward(self, operands: Operands, *, causal: bool) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        query, key, value = operands
        output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal
        )
        return output, logsumexp

    def backward(
        self, gradient: Tensor, operands: Operands, output: Tensor, logsumexp: Tensor, *, causal: bool
    ) -> Operands:
        """See `Kernel.backward`."""
        query, key, value = operands
        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        of_query, of_key, of_value = operator(gradient, query, key, value, output, logsumexp, 0.0, causal)
        return of_query, of_key, of_value


@final
class FlashOnCuda(Kernel):
    """FlashAttention-2, of fp16 and bf16."""

    def forward(self, operands: Operands, *, causal: bool) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        query, key, value = operands
        output, logsumexp, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal
        )
        return output, logsumexp

    def backward(
        self, gradient: Tensor, operands: Operands, output: Tensor, logsumexp: Tensor, *, causal: bool
    ) -> Operands:
        """See `Kernel.backward`."""
        query, key, value = operands
        unused = torch.empty(2, dtype=torch.uint64, device=query.device)  # the state of dropout
        of_query, of_key, of_value = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            gradient,
            query,
            key,
            value,
            output,
            logsumexp.contiguous(),
            None,
            None,
            query.shape[2],
            key.shape[2],
            0.0,
            causal,
            unused,
            unused,
        )
        return of_query, of_key, of_value


@final
class EfficientOnCuda(Kernel):
    """The kernel of xFormers, also for fp32: without shared keys, log-sum-exp padded to 32 rows."""

    def forward(self, operands: Operands, *, causal: bool) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        query, key, value = operands
        key, value = (_repeat(each, query.shape[1]) for each in (key, value))
        output, logsumexp, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, causal
        )
        return output, logsumexp[..., : query.shape[2]]

    def backward(
        self, gradient: Tensor, operands: Operands, output: Tensor, logsumexp: Tensor, *, causal: bool
    ) -> Operands:
        """See `Kernel.backward`."""
        query, key, value = operands
        kv_heads = key.shape[1]
        key, value = (_repeat(each, query.shape[1]) for each in (key, value))
        unused = torch.empty((), dtype=torch.int64, device=query.device)  # the state of dropout
        of_query, of_key, of_value, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            gradient,
            query,
            key,
            value,
            None,
            output,
            F.pad(logsumexp, (0, -logsumexp.shape[-1] % 32), value=math.inf).contiguous(),
            unused,
            unused,
            0.0,
            [True, True, True, False],
            causal,
        )
        return of_query, _sum_shared(of_key, kv_heads), _sum_shared(of_value, kv_heads)


@final
class PlainProducts(Kernel):
    """The definition, some rows at a time: the memory of scores grows only with `keys`.

    Args:
        rows: Number of rows at a time.
        seen: Which queries see which keys, `[batch, 1, queries, keys]`; None if `causal` says so. A query
            that sees none gets zeros, and a log-sum-exp of minus infinity.
    """

    def __init__(self, rows: int = 256, seen: Tensor | None = None) -> None:
        self._rows = rows
        self._mask = seen

    def forward(self, operands: Operands, *, causal: bool) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        query, key, value = operands
        key, value = (_repeat(each, query.shape[1]).to(_wide(query)) for each in (key, value))
        outputs, logsumexps = [], []
        for first, rows in self._tiles(query):
            scores = self._scores(rows, key, first, causal=causal)
            sums = scores.logsumexp(-1)
            logsumexps.append(sums)
            weights = scores.softmax(-1)
            if self._mask is not None:
                weights = weights.masked_fill(sums.isneginf()[..., None], 0)
            outputs.append(weights @ value)
        return torch.cat(outputs, 2).to(query.dtype), torch.cat(logsumexps, 2)

    def backward(
        self, gradient: Tensor, operands: Operands, output: Tensor, logsumexp: Tensor, *, causal: bool
    ) -> Operands:
        """See `Kernel.backward`."""
        query, key, value = operands
        kv_heads, dtype = key.shape[1], query.dtype
        key, value = (_repeat(each, query.shape[1]).to(_wide(query)) for each in (key, value))
        of_query, of_key, of_value = [], torch.zeros_like(key), torch.zeros_like(value)
        scale = 1 / math.sqrt(query.shape[-1])
        parts = [tensor.split(self._rows, 2) for tensor in (gradient, output, logsumexp)]
        for (first, rows), gradients, outputs, sums in zip(self._tiles(query), *parts, strict=True):
            gradients = gradients.to(key.dtype)
            weights = (self._scores(rows, key, first, causal=causal) - sums[..., None]).exp()
            of_value += weights.mT @ gradients
            # Softmax's own gradient: each row's mean of the weights' gradients is subtracted.
            mean = (gradients * outputs).sum(-1, keepdim=True)
            of_scores = weights * (gradients @ value.mT - mean) * scale
            of_query.append(of_scores @ key)
            of_key += of_scores.mT @ rows.to(key.dtype)
        return (
            torch.cat(of_query, 2).to(dtype),
            _sum_shared(of_key, kv_heads).to(dtype),
            _sum_shared(of_value, kv_heads).to(dtype),
        )

    def _tiles(self, query: Tensor) -> list[tuple[int, Tensor]]:
        """Return the queries, some rows at a time, each with its first row's number."""
        return [(number * self._rows, rows) for number, rows in enumerate(query.split(self._rows, 2))]

    def _scores(self, rows: Tensor, key: Tensor, first: int, *, causal: bool) -> Tensor:
        """Return the scaled scores of some rows of the queries, which begin at row `first`."""
        scores = rows.to(key.dtype) @ key.mT / math.sqrt(rows.shape[-1])
        if self._mask is not None:
            seen = self._mask.narrow(2, first, rows.shape[2])
        elif causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(first)
        else:
            return scores
        return scores.masked_fill(~seen, -math.inf)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _repeat(tensor: Tensor, heads: int) -> Tensor:
    """Return the keys or values, repeated for every query head."""
    shared_by = heads // tensor.shape[1]
    return tensor if shared_by == 1 else tensor.repeat_interleave(shared_by, 1)


def _sum_shared(gradient: Tensor, kv_heads: int) -> Tensor:
    """Return the gradient of the input of `_repeat`."""
    shared_by = gradient.shape[1] // kv_heads
    return gradient if shared_by == 1 else gradient.unflatten(1, (kv_heads, shared_by)).sum(2)


@between_graphs
def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, axis: Axis, documents: Documents | None = None
) -> Tensor:
    """Return causal attention to the whole sequence; all ranks of the axis call it together.

    Args:
        query: `[batch, heads, seq / cp, head_dim]`: this rank's part, as `zigzag_positions` cuts it.
        key: `[batch, kv_heads, seq / cp, head_dim]`, where `kv_heads` divides `heads`.
        value: `[batch, kv_heads, seq / cp, head_dim]`.
        axis: The context axis, of cp ranks.
        documents: Documents of the whole samples, which attention does not leave; None if a sample is one.

    Returns:
        `[batch, heads, seq / cp, head_dim]`, this rank's part of the result.
    """
    if axis.size == 1:
        return causal_attention(query, key, value, documents)
    starts = None if documents is None else documents.starts
    output: Tensor = _RingAttention.apply(query, key, value, starts, axis)
    return output


_AXIS: ContextVar[Axis] = ContextVar("_AXIS")
"""The axis for `_attend`: an operator's arguments can only be tensors and numbers."""


@torch.library.custom_op("shoal::ring_attention", mutates_args=())
def _attend(query: Tensor, key: Tensor, value: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return this rank's part of output and log-sum-exp."""
    axis = _AXIS.get()
    joined: _Joined | None = None
    for source, (keys, values) in _round(torch.stack((key, value)), axis):
        rows, columns = _seen(source, axis.index, query.shape[2])
        operands = query[:, :, rows], keys[:, :, columns], values[:, :, columns]
        causal = source == axis.index
        kernel = kernel_for(operands, causal=causal, seen=_mask(starts, source, axis, rows, columns))
        output, logsumexp = kernel.forward(operands, causal=causal)
        if joined is None:
            joined = _Joined(output, logsumexp)
        else:
            joined.add(output, logsumexp, rows)
    assert joined is not None
    return joined.output.to(query.dtype), joined.logsumexp


@final
class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, starts: Tensor | None, axis: Axis
    ) -> Tensor:
        outside = _AXIS.set(axis)
        try:
            results: tuple[Tensor, Tensor] = _attend(query, key, value, starts)
        finally:
            _AXIS.reset(outside)
        ctx.axis, ctx.starts = axis, starts
        ctx.save_for_backward(query, key, value, *results)
        return results[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, output, logsumexp = ctx.saved_tensors
        axis, gradient, wide = ctx.axis, gradient.contiguous(), logsumexp.dtype
        of_query = torch.zeros_like(query, dtype=wide)
        of_pair: Tensor | None = None
        sent: _Sent | None = None
        for source, (keys, values) in _round(torch.stack((key, value)), axis):
            rows, columns = _seen(source, axis.index, query.shape[2])
            operands = query[:, :, rows], keys[:, :, columns], values[:, :, columns]
            causal = source == axis.index
            kernel = kernel_for(operands, causal=causal, seen=_mask(ctx.starts, source, axis, rows, columns))
            of_rows, *of_columns = kernel.backward(
                gradient[:, :, rows],
                operands,
                output[:, :, rows],
                logsumexp[:, :, rows],
                causal=causal,
            )
            of_query[:, :, rows] += of_rows
            if source == axis.index:
                of_pair = torch.stack(of_columns).to(wide)
                continue
            # The first rank to attend to a block begins the sum of its gradients, which then follows the
            # block.
            travelling = key.new_zeros((2, *key.shape), dtype=wide) if sent is None else sent.arrived()
            travelling[0, :, :, columns] += of_columns[0]
            travelling[1, :, :, columns] += of_columns[1]
            sent = _Sent(travelling, axis)
        assert of_pair is not None
        assert sent is not None
        of_pair += sent.arrived()
        of_key, of_value = of_pair.to(key.dtype)
        return of_query.to(query.dtype), of_key, of_value, None, None


def _round(pair: Tensor, axis: Axis) -> Iterator[tuple[int, Tensor]]:
    """Yield keys and values `[2, ...]` of every rank, each with the rank's index; this rank's come first.

    The next ones travel while one is being used.
    """
    for step in range(axis.size - 1):
        received = torch.empty_like(pair)
        pending = axis.shift(received, pair, "keys and values")
        yield (axis.index - step) % axis.size, pair
        pending.wait()
        pair = received
    yield (axis.index + 1) % axis.size, pair


def _seen(source: int, index: int, part: int) -> tuple[slice, slice]:
    """Return which queries of rank `index` see which keys of rank `source`; parts have `part` positions."""
    half = part // 2
    if source == index:
        return slice(0, part), slice(0, part)
    if source < index:
        return slice(0, part), slice(0, half)
    return slice(half, part), slice(0, part)


def _mask(starts: Tensor | None, source: int, axis: Axis, rows: slice, columns: slice) -> Tensor | None:
    """Return which of these queries of this rank see which keys of rank `source`; None without documents."""
    if starts is None:
        return None
    queries, keys = (
        zigzag_positions(starts.shape[1], axis.size, index, starts.device) for index in (axis.index, source)
    )
    return sees(starts, queries[rows], keys[columns])


@final
class _Joined:
    """The attention to all blocks of keys so far, in fp32 or wider."""

    def __init__(self, output: Tensor, logsumexp: Tensor) -> None:
        self.output = output.to(logsumexp.dtype)
        self.logsumexp = logsumexp

    def add(self, output: Tensor, logsumexp: Tensor, rows: slice) -> None:
        """Join these rows' result for another block; a row's two weights add up to 1."""
        before, sums = self.output[:, :, rows], self.logsumexp[:, :, rows]
        before.lerp_(output.to(before.dtype), (logsumexp - sums).sigmoid()[..., None])
        sums.copy_(torch.logaddexp(sums, logsumexp))


@final
class _Sent:
    """Gradients sent to the next rank, and received from the previous rank."""

    def __init__(self, gradients: Tensor, axis: Axis) -> None:
        self._gradients = gradients  # keep them until the peer has them
        self._received = torch.empty_like(gradients)
        self._pending: Pending = axis.shift(self._received, gradients, "key and value gradients")

    def arrived(self) -> Tensor:
        """Wait, and return the received gradients."""
        self._pending.wait()
        return self._received
