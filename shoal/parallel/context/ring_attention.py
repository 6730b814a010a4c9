"""Causal attention over a sequence that is spread over ranks, by keys and values that go round a ring.

Liu et al., "Ring Attention with Blockwise Transformers", arXiv:2310.01889. Each rank keeps its queries. Keys
and values are sent on to the next rank while the block that is there is attended to, `cp - 1` times; outputs
of the blocks are joined by their log-sum-exp. In backward keys and values go round again, and the gradients
of each travel after them and end at the rank that it came from: `cp - 1` times as well.

The sequence is cut as `zigzag_positions` says: rank i of n holds chunks i and 2n - 1 - i of 2n. So what comes
from an earlier rank has one chunk that every query here sees, and one that none sees; of what comes from a
later rank only the later queries see anything, and they see all. Every step but the first is half a block, of
equal work on all ranks, and no step needs a mask but the first, which is a causal block as any other
(balancing: Brandon et al., "Striped Attention", arXiv:2311.09431).

Each rank sends `2 (cp - 1)` times the elements of its keys in forward, and `4 (cp - 1)` in backward, where
gradients travel in fp32. Beside its own part of everything it holds two other parts of keys and values, and
in backward of their gradients.

What forward computes is one operator to whoever looks on, so that selective recompute keeps its two results,
output and log-sum-exp, and neither those of each block nor a second round of the ring.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.models.transformer import causal_attention
from shoal.parallel.communication import Axis, Pending
from shoal.parallel.context.fused_attention import kernel_for

__all__ = ["ring_attention"]


def ring_attention(query: Tensor, key: Tensor, value: Tensor, axis: Axis) -> Tensor:
    """Causal attention to the whole sequence; all ranks of the axis call it together.

    Args:
        query: `[batch, heads, seq / cp, head_dim]`: this rank's part, as `zigzag_positions` cuts it.
        key: `[batch, kv_heads, seq / cp, head_dim]`, where `kv_heads` divides `heads`.
        value: As well.
        axis: The context axis, of cp ranks.

    Returns:
        `[batch, heads, seq / cp, head_dim]`, this rank's part of the result.
    """
    if axis.size == 1:
        return causal_attention(query, key, value)
    output: Tensor = _RingAttention.apply(query, key, value, axis)
    return output


_AXIS: ContextVar[Axis] = ContextVar("_AXIS")
"""What `_attend` communicates over: an operator takes tensors and numbers alone."""


@torch.library.custom_op("shoal::ring_attention", mutates_args=())
def _attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's part of output and log-sum-exp."""
    axis = _AXIS.get()
    joined: _Joined | None = None
    for source, (keys, values) in _round(torch.stack((key, value)), axis):
        rows, columns = _seen(source, axis.index, query.shape[2])
        operands = query[:, :, rows], keys[:, :, columns], values[:, :, columns]
        causal = source == axis.index
        output, logsumexp = kernel_for(operands, causal=causal).forward(operands, causal=causal)
        if joined is None:
            joined = _Joined(output, logsumexp)
        else:
            joined.add(output, logsumexp, rows)
    assert joined is not None
    return joined.output.to(query.dtype), joined.logsumexp


@final
class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, axis: Axis) -> Tensor:
        outside = _AXIS.set(axis)
        try:
            results: tuple[Tensor, Tensor] = _attend(query, key, value)
        finally:
            _AXIS.reset(outside)
        ctx.axis = axis
        ctx.save_for_backward(query, key, value, *results)
        return results[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, output, logsumexp = ctx.saved_tensors
        axis, gradient, wide = ctx.axis, gradient.contiguous(), logsumexp.dtype
        of_query = torch.zeros_like(query, dtype=wide)
        of_pair: Tensor | None = None
        sent: _Sent | None = None
        for source, (keys, values) in _round(torch.stack((key, value)), axis):
            rows, columns = _seen(source, axis.index, query.shape[2])
            operands = query[:, :, rows], keys[:, :, columns], values[:, :, columns]
            causal = source == axis.index
            of_rows, *of_columns = kernel_for(operands, causal=causal).backward(
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
            # The first to attend to a block begins the sum of its gradients, which then follows it.
            travelling = key.new_zeros((2, *key.shape), dtype=wide) if sent is None else sent.arrived()
            travelling[0, :, :, columns] += of_columns[0]
            travelling[1, :, :, columns] += of_columns[1]
            sent = _Sent(travelling, axis)
        assert of_pair is not None
        assert sent is not None
        of_pair += sent.arrived()
        of_key, of_value = of_pair.to(key.dtype)
        return of_query.to(query.dtype), of_key, of_value, None


def _round(pair: Tensor, axis: Axis) -> Iterator[tuple[int, Tensor]]:
    """Keys and values `[2, ...]` of every rank, each with the rank's index, this rank's first.

    The next are on their way while one is being used.
    """
    for step in range(axis.size - 1):
        received = torch.empty_like(pair)
        pending = axis.shift(received, pair, "keys and values")
        yield (axis.index - step) % axis.size, pair
        pending.wait()
        pair = received
    yield (axis.index + 1) % axis.size, pair


def _seen(source: int, index: int, part: int) -> tuple[slice, slice]:
    """Which queries of rank `index` see which keys of rank `source`; parts have `part` positions."""
    half = part // 2
    if source == index:
        return slice(0, part), slice(0, part)
    if source < index:
        return slice(0, part), slice(0, half)
    return slice(half, part), slice(0, part)


@final
class _Joined:
    """The attention to all blocks of keys so far, in fp32 or wider."""

    def __init__(self, output: Tensor, logsumexp: Tensor) -> None:
        self.output = output.to(logsumexp.dtype)
        self.logsumexp = logsumexp

    def add(self, output: Tensor, logsumexp: Tensor, rows: slice) -> None:
        """Joins what these rows made of another block; a row's two weights add up to 1."""
        before, sums = self.output[:, :, rows], self.logsumexp[:, :, rows]
        before.lerp_(output.to(before.dtype), (logsumexp - sums).sigmoid()[..., None])
        sums.copy_(torch.logaddexp(sums, logsumexp))


@final
class _Sent:
    """Gradients that were sent to the next rank, in exchange for those of the rank before."""

    def __init__(self, gradients: Tensor, axis: Axis) -> None:
        self._gradients = gradients  # held until they are there
        self._received = torch.empty_like(gradients)
        self._pending: Pending = axis.shift(self._received, gradients, "key and value gradients")

    def arrived(self) -> Tensor:
        """What came, once it is there."""
        self._pending.wait()
        return self._received
