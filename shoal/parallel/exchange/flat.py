"""A rank's parts of parameters as one vector, one part after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.parallel.owned import Owned


def pack(owned: Sequence[Owned], tensors: Sequence[torch.Tensor | None], vector: torch.Tensor) -> None:
    """Copy a tensor for each part into a vector.

    Args:
        owned: The parts, in order.
        tensors: For each part, a tensor like it; None for zeros.
        vector: `[elements]`, fp32.
    """
    given = [
        torch.zeros_like(each.local) if one is None else one for each, one in zip(owned, tensors, strict=True)
    ]
    torch._foreach_copy_(_views(owned, vector), given)


def unpack(owned: Sequence[Owned], vector: torch.Tensor) -> None:
    """Copy a vector into the parts that `pack` made one of."""
    torch._foreach_copy_([each.local for each in owned], _views(owned, vector))


def _views(owned: Sequence[Owned], vector: torch.Tensor) -> list[torch.Tensor]:
    parts = vector.split([each.local.numel() for each in owned])
    return [part.view(each.local.shape) for part, each in zip(parts, owned, strict=True)]
