"""The tensors of a call, made into what the core takes: contiguous memory on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shoal.errors import CollectiveError

__all__ = [
    "bytes_of",
    "contiguous_bytes",
    "require_dense",
    "require_size",
    "split_bytes",
    "to_be_changed",
    "to_be_filled",
]


def bytes_of(tensor: torch.Tensor) -> int:
    """The size of its elements."""
    return tensor.numel() * tensor.element_size()


def require_dense(tensor: torch.Tensor) -> torch.Tensor:
    """Gives the tensor back; raises CollectiveError for one that the core cannot move."""
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        raise CollectiveError(
            f'the backend "shoal" moves dense tensors on the CPU, not {tensor.layout} on {tensor.device}',
            fault="invalid",
        )
    # No element has more than 16 bytes, and no memory begins as low: so this finds what begins at 0.
    if tensor.data_ptr() <= 16 * tensor.storage_offset() and tensor.numel():
        raise CollectiveError(
            f'the backend "shoal" moves tensors that have memory; a {type(tensor).__name__} of shape '
            f"{list(tensor.shape)} has none: give the tensor within it, of a DTensor its to_local()",
            fault="invalid",
        )
    return tensor


def contiguous_bytes(tensor: torch.Tensor) -> int:
    """The size of its elements; raises CollectiveError unless they lie one after another."""
    if not tensor.is_contiguous():
        raise CollectiveError("stripes lie in a contiguous buffer", fault="invalid")
    return bytes_of(tensor)


def require_size(tensor: torch.Tensor, elements: int, what: str) -> None:
    """Raises CollectiveError unless the tensor has that many elements."""
    if tensor.numel() != elements:
        raise CollectiveError(f"{what} has {tensor.numel()} elements, and needs {elements}", fault="invalid")


def to_be_changed(
    tensor: torch.Tensor, finish: Callable[[], None] | None = None
) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """A contiguous tensor of real numbers to be read and written, and what to do afterwards."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_contiguous():
        return tensor, finish
    copy = tensor.contiguous()

    def write_back() -> None:
        tensor.copy_(copy)
        if finish is not None:
            finish()

    return copy, write_back


def to_be_filled(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """A contiguous tensor to be written, and what to do afterwards."""
    if tensor.is_contiguous():
        return tensor, None
    copy = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    return copy, lambda: _copy(copy, tensor)


def _copy(from_: torch.Tensor, to: torch.Tensor) -> None:
    to.copy_(from_)


def split_bytes(tensor: torch.Tensor, splits: Sequence[int], ranks: int, what: str) -> list[int]:
    """The bytes of each rank's part of a tensor that is split along its first dim; equal ones without splits.

    Raises:
        CollectiveError: The splits do not fit the tensor.
    """
    rows = tensor.shape[0] if tensor.dim() else 0
    row = bytes_of(tensor) // rows if rows else 0
    if not splits:
        if rows % ranks:
            raise CollectiveError(
                f"the {what} of all_to_all has {rows} rows, which {ranks} ranks cannot share equally",
                fault="invalid",
            )
        return [rows // ranks * row] * ranks
    if len(splits) != ranks or sum(splits) != rows:
        raise CollectiveError(
            f"the {what} splits of all_to_all are {list(splits)}; {ranks} are needed, {rows} in all",
            fault="invalid",
        )
    return [split * row for split in splits]
