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
"""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, final

import torch
from torch import Tensor

from shoal.models.attention import causal_attention
from shoal.models.documents import Documents, sees
from shoal.models.once_differentiable import once_differentiable
from shoal.parallel.access import between_graphs
from shoal.parallel.communication import Axis, Pending
from shoal.parallel.context.fused_attention import kernel_for
from shoal.parallel.context.positions import zigzag_positions


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
