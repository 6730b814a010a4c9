"""Causal attention over a sequence spread over ranks: all-to-alls exchange heads for positions.

Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509. An all-to-all gives each rank some of the heads for the
whole sequence, any kernel computes their attention, and another all-to-all brings each rank all heads of its
part of the sequence. Backward does this in reverse. Each rank sends `(cp - 1) / cp` of the elements of its
query, key, value and output, in forward and in backward.

Heads need not divide evenly. A rank gets the key heads that its query heads see, so several ranks may get
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from shoal.errors import PlanError
from shoal.models.attention import Documents, causal_attention
from shoal.models.once_differentiable import once_differentiable
from shoal.parallel.communication import Axis
from shoal.parallel.weight_hooks import between_graphs


@between_graphs
def ulysses_attention(
    query: Tensor, key: Tensor, value: Tensor, axis: Axis, documents: Documents | None = None
) -> Tensor:
    """Return causal attention to the whole sequence; all ranks of the axis call it together.

    Args:
        query: `[batch, heads, seq / cp, head_dim]`: this rank's part, as `contiguous_positions` cuts it.
        key: `[batch, kv_heads, seq / cp, head_dim]`, where `kv_heads` divides `heads`.
        value: `[batch, kv_heads, seq / cp, head_dim]`.
        axis: The context axis, of cp ranks.
        documents: Documents of the whole samples, which attention does not leave; None if a sample is one.

    Returns:
        `[batch, heads, seq / cp, head_dim]`, this rank's part of the result.

    Raises:
        PlanError: There are fewer heads than ranks.
    """
    if axis.size == 1:
        return causal_attention(query, key, value, documents)
    heads, kv_heads = query.shape[1], key.shape[1]
    require_heads(heads, axis.size)
    shares = _shares(heads, kv_heads, axis.size)
    query, key, value = _ToHeads.apply(query, key, value, axis, shares)
    mine, shared_by = shares[axis.index], heads // kv_heads
    keys, values = mine.as_seen(key, shared_by), mine.as_seen(value, shared_by)
    mixed = causal_attention(query, keys, values, documents)
    output: Tensor = _ToPositions.apply(mixed, axis, shares)
    return output


def require_heads(heads: int, size: int) -> None:
    """Check that `size` ranks can share this many query heads.

    Raises:
        PlanError: There are fewer heads than ranks.
    """
    if heads < size:
        raise PlanError(
            f"context=ulysses was given with cp={size}, but a rank has only {heads} query heads",
            possible=f"cp up to {heads}, or context=ring with any number of heads",
            change="use context=ring, or a smaller cp",
        )


@final
class _Share:
    """The query heads of one rank, and the key heads that they see."""

    def __init__(self, queries: slice, keys: slice) -> None:
        self.queries = queries
        self.keys = keys
        self.heads = queries.stop - queries.start
        self.kv_heads = keys.stop - keys.start
        self.row_counts = [self.heads, self.kv_heads, self.kv_heads]
        self.rows = sum(self.row_counts)

    def as_seen(self, keys: Tensor, shared_by: int) -> Tensor:
        """Return this share's keys or values, repeated if its query heads do not see them equally often."""
        if self.kv_heads == 1 or (self.queries.start % shared_by == self.queries.stop % shared_by == 0):
            return keys
        numbers = [
            head // shared_by - self.keys.start for head in range(self.queries.start, self.queries.stop)
        ]
        repeated = [
            keys[:, number : number + 1].expand(-1, numbers.count(number), -1, -1)
            for number in range(self.kv_heads)
        ]
        return torch.cat(repeated, 1)


def _shares(heads: int, kv_heads: int, size: int) -> list[_Share]:
    """Return each rank's share, as equal as possible."""
    shared_by = heads // kv_heads
    shares = []
    for index in range(size):
        first, end = heads * index // size, heads * (index + 1) // size
        shares.append(_Share(slice(first, end), slice(first // shared_by, (end - 1) // shared_by + 1)))
    return shares


@final
class _ToHeads(torch.autograd.Function):
    """Exchange all heads of some positions for some heads of all positions, in one all-to-all."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, axis: Axis, shares: list[_Share]
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.axis, ctx.shares, ctx.kv_heads = axis, shares, key.shape[1]
        parts = [
            part
            for share in shares
            for part in (query[:, share.queries], key[:, share.keys], value[:, share.keys])
        ]
        received = _exchange_for_heads(parts, axis, [share.rows for share in shares])
        query, key, value = received.split(shares[axis.index].row_counts, 1)
        return query, key, value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        shares: list[_Share] = ctx.shares
        received = _exchange_for_positions(
            torch.cat(gradients, 1), ctx.axis, [share.rows for share in shares]
        )
        parts = received.split([rows for share in shares for rows in share.row_counts], 1)
        batch, _, part, head_dim = received.shape
        # Keys that went to several ranks get the sum of their gradients, in fp32 or wider.
        wide = torch.promote_types(received.dtype, torch.float32)
        of_pair = received.new_zeros((2, batch, ctx.kv_heads, part, head_dim), dtype=wide)
        for share, of_key, of_value in zip(shares, parts[1::3], parts[2::3], strict=True):
            of_pair[0, :, share.keys] += of_key
            of_pair[1, :, share.keys] += of_value
        of_key, of_value = of_pair.to(received.dtype)
        return torch.cat(parts[0::3], 1), of_key, of_value, None, None


@final
class _ToPositions(torch.autograd.Function):
    """Exchange some heads of all positions for all heads of some positions."""

    @staticmethod
    def forward(ctx: Any, mixed: Tensor, axis: Axis, shares: list[_Share]) -> Tensor:
        ctx.axis, ctx.heads = axis, [share.heads for share in shares]
        return _exchange_for_positions(mixed, axis, ctx.heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _exchange_for_heads(gradient.split(ctx.heads, 1), ctx.axis, ctx.heads), None, None


def _exchange_for_heads(parts: Sequence[Tensor], axis: Axis, rows: list[int]) -> Tensor:
    """Send heads to other ranks and receive the other positions of this rank's heads.

    Args:
        parts: Each `[batch, some heads, seq / cp, head_dim]`, in the order of the ranks that they go to.
        axis: The context axis.
        rows: Number of heads that go to each rank.

    Returns:
        This rank's heads, `[batch, rows[index], seq, head_dim]`.
    """
    mine = rows[axis.index]
    sent = torch.cat([part.transpose(0, 1) for part in parts])
    received = sent.new_empty((axis.size, mine, *sent.shape[1:]))
    axis.all_to_all(
        received.flatten(0, 1), sent, "heads", received_rows=[mine] * axis.size, sent_rows=rows
    ).wait()
    return received.permute(2, 1, 0, 3, 4).flatten(2, 3)


def _exchange_for_positions(heads: Tensor, axis: Axis, rows: list[int]) -> Tensor:
    """Do the reverse: `[batch, rows[index], seq, head_dim]` to `[batch, sum(rows), seq / cp, head_dim]`."""
    mine = rows[axis.index]
    parts: Tensor = heads.unflatten(2, (axis.size, -1))
    sent = parts.permute(2, 1, 0, 3, 4).flatten(0, 1)
    received = sent.new_empty((sum(rows), *sent.shape[1:]))
    axis.all_to_all(
        received, sent.contiguous(), "positions", received_rows=rows, sent_rows=[mine] * axis.size
    ).wait()
    return received.transpose(0, 1)
