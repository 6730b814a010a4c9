"""Checks of a call's operands, before anything is sent.

Every check raises CollectiveError with the fault "invalid" if it does not accept an operand.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from shoal.collectives.enums import described, refusal, type_name
from shoal.errors import CollectiveError

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


class Stripes:
    """Positions of the tensors in a buffer, in the form of the native core.

    Args:
        stripes: For each tensor, the byte where it begins and the bytes of one rank's part. Rank i's part
            begins i parts after that byte. The tensors are in the order of their positions, and none overlaps
            the next. All ranks give the same.
    """

    def __init__(self, stripes: Sequence[tuple[int, int]]) -> None:
        self.positions = tuple(stripes)
        numbers = [number for stripe in self.positions for number in stripe]
        self._numbers = (ctypes.c_uint64 * len(numbers))(*numbers)
        self.address = ctypes.addressof(self._numbers)
        self.count = len(self.positions)

    @property
    def part_bytes(self) -> int:
        """Bytes of one rank's parts of all tensors."""
        return sum(part for _, part in self.positions)


Item = TypeVar("Item")
Other = TypeVar("Other")


def only(items: Sequence[Item], what: str) -> Item:
    """Return the only item of a list; raise CollectiveError if it has not exactly one."""
    try:
        (item,) = items
    except ValueError:
        raise refusal(
            f"{what} was given a list of {len(items)}",
            possible="a list of one",
            change="call it once for each",
        ) from None
    return item


def require_type(output: torch.Tensor, tensor: torch.Tensor, what: str) -> None:
    """Raise CollectiveError unless both tensors of a call have the same type."""
    if output.dtype is not tensor.dtype:
        raise refusal(
            f"{what} was given an output of {described(output)} and an input of {described(tensor)}",
            possible="an output and an input of one type",
            change=f"convert one of them, for example the input with .to({output.dtype})",
        )


def require_parts(whole: torch.Tensor, part: torch.Tensor, ranks: int, what: str) -> None:
    """Raise CollectiveError unless `whole` has a part for every rank."""
    if whole.numel() != ranks * part.numel():
        raise refusal(
            f"{what} was given {described(whole)} for {ranks} parts of {described(part)}",
            possible=f"{ranks * part.numel()} elements, or parts of {whole.numel()} / {ranks}",
            change="make the tensor of all ranks as large as their parts together",
        )


def require_pairs(outputs: Sequence[Item], inputs: Sequence[Other], what: str) -> list[tuple[Item, Other]]:
    """Return each output with its input; raise CollectiveError if the numbers differ or are 0."""
    if len(outputs) != len(inputs) or not outputs:
        raise refusal(
            f"{what} was given {len(outputs)} outputs for {len(inputs)} inputs",
            possible="equal numbers of outputs and inputs, at least one",
            change="give an output for every input",
        )
    return list(zip(outputs, inputs, strict=True))


def require_list(
    tensors: Sequence[torch.Tensor],
    what: str,
    *,
    count: int | None = None,
    like: torch.Tensor | None = None,
    even: bool = False,
) -> bool:
    """Check that a list has tensors of one type which the backend can move.

    Args:
        tensors: The list.
        what: Name of the list in the error, such as "the output list of all_gather".
        count: Length that the list must have; at least one by default.
        like: A tensor of the type that they must have; by default the first of the list.
        even: Whether each must have as many elements as `like`.

    Returns:
        Whether each has as many elements as `like`.

    Raises:
        CollectiveError: The list is not as described.
    """
    if len(tensors) != count if count is not None else not tensors:
        raise refusal(
            f"{what} has {len(tensors)} tensors",
            possible="one for every rank of the group" if count is not None else "one or more",
            change=f"give a list of {count or 1}",
        )
    like = tensors[0] if like is None else like
    dtype, elements, is_even = like.dtype, like.numel(), True
    for tensor in tensors:
        if (
            tensor.dtype is not dtype
            or not (tensor.is_cpu or tensor.is_cuda)
            or tensor.layout is not torch.strided
        ):
            raise _misfit(tensors, what, like, even)
        is_even = is_even and tensor.numel() == elements
    if even and not is_even:
        raise _misfit(tensors, what, like, even)
    if dtype.is_complex:
        for tensor in tensors:
            require_dense(tensor)
    return is_even


def _misfit(tensors: Sequence[torch.Tensor], what: str, like: torch.Tensor, even: bool) -> CollectiveError:
    for tensor in tensors:
        require_dense(tensor)
    return refusal(
        f"{what} has {', '.join(map(described, tensors))}, for {described(like)}",
        possible=f"tensors of {type_name(like.dtype)}" + (f" with {like.numel()} elements" if even else ""),
        change="give tensors of one type" + (" and size" if even else ""),
    )


def require_size(tensor: torch.Tensor, elements: int, what: str) -> None:
    """Raise CollectiveError unless the tensor has that many elements."""
    if tensor.numel() != elements:
        raise refusal(
            f"{what} is {described(tensor)}",
            possible=f"a tensor with {elements} elements",
            change="give one of that size",
        )


def require_in_group(rank: int, size: int, what: str, *, own: int | None = None) -> int:
    """Return the rank; raise CollectiveError unless the group has it and it is not this rank, `own`."""
    if not 0 <= rank < size or rank == own:
        raise refusal(
            f"{what} is rank {rank}, in a group of {size}" + (f", on rank {own}" if own is not None else ""),
            possible=f"another rank, 0 to {size - 1}" if own is not None else f"0 to {size - 1}",
            change="give the rank within the group (torch.distributed.get_group_rank)",
        )
    return rank


def uneven_own_part(sent: int, received: int) -> CollectiveError:
    """Return the error for a rank whose own part of all_to_all has two sizes, in bytes."""
    return refusal(
        f"all_to_all was given {sent} bytes from this rank to itself, and room for {received}",
        possible="parts of the same size in the input and in the output",
        change="give this rank the same split in both; without splits, give an output as large as the input",
    )


def require_tag(tag: int) -> int:
    """Return the tag; raise CollectiveError if messages cannot have it."""
    if not 0 <= tag < 1 << 31:
        raise refusal(
            f"a message was given the tag {tag}",
            possible="0 to 2147483647",
            change="number messages from 0",
        )
    return tag


def contiguous_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements; raise CollectiveError unless it is contiguous."""
    require_dense(tensor)
    if not tensor.is_contiguous():
        raise refusal(
            f"the buffer of stripes is {described(tensor)} with the strides {list(tensor.stride())}",
            possible="a contiguous buffer",
            change="give one, such as a view of one dim",
        )
    return bytes_of(tensor)


def require_stripes(buffer: torch.Tensor, stripes: Stripes, ranks: int) -> None:
    """Raise CollectiveError unless the stripes are of whole elements, apart, and within the buffer."""
    element, nbytes, end = buffer.element_size(), bytes_of(buffer), 0
    for offset, part in stripes.positions:
        after = offset + ranks * part
        if after > nbytes or offset % element or part % element or offset < end:
            why = (
                f"is not within the buffer of {nbytes} bytes"
                if after > nbytes
                else "overlaps the one before it"
                if offset < end
                else f"is not of whole elements of {element} bytes"
            )
            raise refusal(
                f"a stripe of {part} bytes a rank at {offset} {why}",
                possible=f"stripes in the order of their positions, each of {ranks} equal parts",
                change="give the bytes of the buffer's own layout",
            )
        end = after


def split_bytes(tensor: torch.Tensor, splits: Sequence[int], ranks: int, what: str) -> list[int]:
    """Return the bytes of each rank's part of a tensor, split along its first dim; without splits, equally.

    Raises:
        CollectiveError: The splits do not fit the tensor.
    """
    shape = tensor.shape
    if not shape:
        raise refusal(
            f"the {what} of all_to_all is a {type_name(tensor.dtype)} without dims",
            possible="a tensor whose first dim is split over the ranks",
            change="give it a dim, for example with .reshape(1)",
        )
    rows = shape[0]
    row = bytes_of(tensor) // rows if rows else 0
    if not splits:
        if rows % ranks:
            raise refusal(
                f"the {what} of all_to_all is {described(tensor)}, for {ranks} ranks",
                possible=f"a multiple of {ranks} rows, or splits",
                change="give splits, or another number of rows",
            )
        return [rows // ranks * row] * ranks
    if len(splits) != ranks or sum(splits) != rows or min(splits) < 0:
        raise refusal(
            f"the {what} of all_to_all is {described(tensor)}, and its splits are {list(splits)}",
            possible=f"{ranks} splits of 0 or more, {rows} in all",
            change="give the rows of every rank's part",
        )
    return [split * row for split in splits]
