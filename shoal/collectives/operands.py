"""Turns the tensors of a call into contiguous operands, on the CPU or on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shoal.collectives.refusal import described, refusal

_ABOVE_OFFSETS = 1 << 44
"""An address above every element of a tensor that has no memory, whose first element has address 0."""


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.nbytes


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's first element; raise CollectiveError if it has no memory."""
    address = tensor.data_ptr()
    # An element has at most 16 bytes, and no memory begins at so low an address: this finds tensors at 0.
    if address < _ABOVE_OFFSETS and address <= 16 * tensor.storage_offset() and tensor.numel():
        raise refusal(
            f"a {type(tensor).__name__} of shape {list(tensor.shape)} has no memory to send or receive",
            possible="a tensor that has memory",
            change="give the tensor inside it; for a DTensor, its to_local()",
        )
    return address


def require_dense(tensor: torch.Tensor) -> None:
    """Raise CollectiveError for a tensor that the backend cannot move."""
    if not (tensor.is_cpu or tensor.is_cuda) or tensor.layout is not torch.strided or tensor.is_conj():
        kind = "a conjugated view" if tensor.is_conj() else f"{tensor.layout} on {tensor.device}"
        raise refusal(
            f'the backend "shoal" cannot move {described(tensor)}, which is {kind}',
            possible="dense tensors on the CPU, or on a GPU of CUDA",
            change="convert it with .to_dense(), .cpu() or .resolve_conj()",
        )


def require_places(tensor: torch.Tensor) -> None:
    """Raise CollectiveError for a tensor to which the result of a copy could not be written back."""
    address_of(tensor)
    if tensor.numel() and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        raise refusal(
            f"{described(tensor)} with the strides {list(tensor.stride())} has several elements at one "
            "address",
            possible="a tensor with memory for each of its elements",
            change="make it contiguous with .contiguous()",
        )


def to_be_read(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor with the same elements."""
    require_dense(tensor)
    if tensor.is_contiguous():
        return tensor
    address_of(tensor)
    return tensor.detach().contiguous()


def to_be_changed(
    tensor: torch.Tensor, finish: Callable[[], None] | None = None
) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """Return a contiguous tensor to read and write, and the function to call afterwards."""
    require_dense(tensor)
    if tensor.is_contiguous():
        return tensor, finish
    require_places(tensor)
    copy = tensor.detach().contiguous()

    def write_back() -> None:
        tensor.detach().copy_(copy)
        if finish is not None:
            finish()

    return copy, write_back


def to_be_filled(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """Return a contiguous tensor to write, and the function to call afterwards."""
    require_dense(tensor)
    if tensor.is_contiguous():
        return tensor, None
    require_places(tensor)
    copy = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    return copy, lambda: _copy(copy, tensor)


def _copy(from_: torch.Tensor, to: torch.Tensor) -> None:
    to.detach().copy_(from_)
