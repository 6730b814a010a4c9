"""Several tensors as one buffer, which is what the core moves."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["as_one", "joined", "spread"]


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A flat view of tensors that lie one after the other without gaps; None if they do not."""
    first = tensors[0]
    storage, position = first.untyped_storage().data_ptr(), first.data_ptr()
    for tensor in tensors:
        adjacent = tensor.data_ptr() == position or tensor.numel() == 0
        if not (adjacent and tensor.is_contiguous() and tensor.dtype == first.dtype):
            return None
        if tensor.untyped_storage().data_ptr() != storage:
            return None
        position += tensor.numel() * tensor.element_size()
    total = sum(tensor.numel() for tensor in tensors)
    return first.as_strided((total,), (1,))


def as_one(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elements of all, one tensor after the other: a view where they lie so, otherwise a copy."""
    view = joined(tensors)
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if view is None else view


def spread(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copies the elements of `flat` to the tensors, one after the other."""
    for part, tensor in zip(flat.split([tensor.numel() for tensor in tensors]), tensors, strict=True):
        tensor.copy_(part.view(tensor.shape))
