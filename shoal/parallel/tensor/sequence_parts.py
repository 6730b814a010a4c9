"""Parts of a sequence, one for each rank of an axis: their order in memory, gather and reduction.

A hidden state is `[batch, seq, width]`. Part i holds the positions `[i * seq / size, (i + 1) * seq / size)`
of every sample, which are not contiguous in memory for more than one sample. So tensors are communicated in
part order, `[size, batch, seq / size, width]`, in which a part is contiguous.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.errors import PlanError
from shoal.parallel.communication import Axis, Pending, new_buffer


def cut(whole: Tensor, axis: Axis) -> Tensor:
    """Return `[batch, seq, ...]` in part order, `[size, batch, seq / size, ...]`, as a view.

    Raises:
        PlanError: The sequence does not divide by the ranks of the axis.
    """
    seq = whole.shape[1]
    if seq % axis.size:
        lower = max(seq - seq % axis.size, axis.size)
        raise PlanError(
            f"a sequence of {seq} tokens cannot be cut into equal parts for {axis.size} ranks of {axis.name}",
            possible=f"multiples of {axis.size}, such as {lower} or {lower + axis.size}",
            change=f"change the sequence's length, or `{axis.name}`",
        )
    parts: Tensor = whole.unflatten(1, (axis.size, -1)).transpose(0, 1)
    return parts


def joined(parts: Tensor) -> Tensor:
    """Return `[size, batch, part, ...]` as `[batch, size * part, ...]`: a view for one sample, or a copy."""
    return parts.transpose(0, 1).flatten(1, 2)


def new_parts(axis: Axis, part: torch.Size, like: Tensor) -> Tensor:
    """Return an undefined `[size, *part]` to communicate from, with dtype and device of `like`."""
    shape = (axis.size, *part)
    return new_buffer(axis.size * part.numel(), dtype=like.dtype, device=like.device).view(shape)


def start_gather(part: Tensor, axis: Axis, name: str) -> tuple[Tensor, Pending]:
    """Begin to gather every rank's `part`; return the tensor that will hold them, `[size, *part.shape]`."""
    parts = new_parts(axis, part.shape, part)
    parts[axis.index].copy_(part)
    return parts, axis.all_gather(parts.view(-1), name)


def start_reduce_scatter(parts: Tensor, axis: Axis, name: str) -> tuple[Tensor, Pending]:
    """Begin to sum `[size, ...]` over the ranks; return the tensor that will hold this rank's part.

    The part has memory of its own, so that keeping it does not keep all parts. `parts` must stay unchanged
    until the reduction is complete.
    """
    part = parts[0] if axis.size == 1 else torch.empty_like(parts[0])
    return part, axis.reduce_scatter(part.view(-1), parts.view(-1), name)
