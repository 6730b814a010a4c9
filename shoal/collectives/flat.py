"""Makes one buffer, which the core can move, from several tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shoal.collectives.operands import address_of, require_places


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return a flat view of tensors that lie one after the other without gaps; None if they do not."""
    first = tensors[0]
    storage, position = first.untyped_storage().data_ptr(), first.data_ptr()
    for tensor in tensors:
        adjacent = tensor.data_ptr() == position or tensor.numel() == 0
        if not (adjacent and tensor.is_contiguous()):
            return None
        if tensor.untyped_storage().data_ptr() != storage:
            return None
        position += tensor.numel() * tensor.element_size()
    total = sum(tensor.numel() for tensor in tensors)
    return first.as_strided((total,), (1,))


def as_one(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elements of all tensors in order: a view if they lie one after the other, else a copy."""
    view = joined(tensors)
    if view is not None:
        return view
    for tensor in tensors:
        address_of(tensor)
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def all_to_be_filled(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """Return a flat tensor for the elements of all, in order, and the function to call once it is written."""
    flat = joined(tensors)
    if flat is not None:
        return flat, None
    copy = tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))
    return copy, to_spread(copy, tensors)


def to_spread(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Return a function that copies the elements of `flat` to the tensors, in order."""
    for tensor in tensors:
        require_places(tensor)

    def spread() -> None:
        for part, tensor in zip(flat.split([tensor.numel() for tensor in tensors]), tensors, strict=True):
            tensor.detach().copy_(part.view(tensor.shape))

    return spread
