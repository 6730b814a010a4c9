"""One collective, as a rank calls it, before an algorithm is chosen."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoal.collectives.checks import Stripes
from shoal.collectives.ctypes_core import Call
from shoal.collectives.enums import COLLECTIVE_NUMBERS, REDUCTION_NAMES


@dataclass(slots=True)
class Operation:
    """One collective of flat buffers.

    Attributes:
        collective: One of `COLLECTIVE_NUMBERS`.
        input: Contiguous input tensor; None if this rank gives nothing.
        output: Contiguous output tensor; None if this rank gets nothing.
        result: Tensors that the Work returns.
        nbytes: Bytes of the tensor, or of one rank's part where each has a part.
        whole: Bytes of the whole buffer, by which the algorithm is chosen.
        slot: Bytes that one-shot would put into a rank's slot.
        root: Rank of the root in the group.
        reduces: The type that is reduced; None if bytes are moved.
        splits: For all-to-all, bytes to and from every rank.
        stripes: Positions of several tensors in one buffer, for an all-gather or a reduce-scatter in place;
            the ranks are on one host.
        finish: Function that is called once it is complete.
    """

    collective: str
    input: torch.Tensor | None
    output: torch.Tensor | None
    result: Sequence[Any]
    nbytes: int
    whole: int
    slot: int
    root: int = 0
    reduces: torch.dtype | None = None
    splits: tuple[Sequence[int], Sequence[int]] | None = None
    stripes: Stripes | None = None
    finish: Callable[[], None] | None = None


_NAMES = {number: name for name, number in COLLECTIVE_NUMBERS.items()}
_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_REDUCING = ("all_reduce", "reduce_scatter", "reduce")
_DTYPES = sorted({str(each) for each in vars(torch).values() if isinstance(each, torch.dtype)})


def describe_call(call: Call, tensor: torch.Tensor | None) -> list[int]:
    """Return the numbers of a call that have to be equal on all ranks.

    Args:
        call: The call that is about to begin.
        tensor: A tensor of the type that is moved; None for a barrier.
    """
    dtype = _DTYPES.index(str(tensor.dtype)) if tensor is not None else -1
    return [call.collective, dtype, call.reduction, call.root, call.bytes, *_describe_stripes(call)]


def _describe_stripes(call: Call) -> tuple[int, int]:
    """Return the number of stripes and a number for their positions; (-1, 0) for a single tensor."""
    if call.stripes is None:
        return -1, 0
    numbers = (ctypes.c_uint64 * (2 * call.stripe_count)).from_address(call.stripes)
    return call.stripe_count, zlib.crc32(bytes(numbers))


def first_difference(calls: Sequence[Sequence[int]], rank: int) -> tuple[int, str] | None:
    """Return the first rank whose call differs from this rank's, and the difference; None if none differs.

    Args:
        calls: The call of each rank, as `describe_call` returns it.
        rank: This rank.
    """
    own = calls[rank]
    for other, theirs in enumerate(calls):
        if theirs != own:
            return other, f"rank {other} calls {_text(theirs)} where rank {rank} calls {_text(own)}"
    return None


def first_uneven_split(splits: Sequence[Sequence[int]]) -> tuple[int, str] | None:
    """Return the first rank that sends a size its receiver does not expect, and the error; None if none does.

    Args:
        splits: For each rank, the bytes to all ranks and then the bytes from all ranks.
    """
    size = len(splits)
    for sender in range(size):
        for receiver in range(size):
            sent, expected = splits[sender][receiver], splits[receiver][size + sender]
            if sent != expected:
                return sender, (
                    f"rank {sender} calls all_to_all with {sent} bytes to rank {receiver}, which calls "
                    f"all_to_all with {expected} bytes from rank {sender}"
                )
    return None


def _text(told: Sequence[int]) -> str:
    collective, dtype, reduction, root, nbytes, stripes, place = told
    name = _NAMES.get(collective, f"collective {collective}")
    text = name
    if dtype >= 0:
        text += f" of {_DTYPES[dtype].removeprefix('torch.')}"
    if name not in ("barrier", "all_to_all"):
        text += f", {nbytes} bytes"
    if name in _REDUCING:
        text += f", {REDUCTION_NAMES[reduction]}"
    if stripes >= 0:
        text += f", in {stripes} stripes at {place:08x}"
    if name in _ROOTED:
        text += f", root {root}"
    return text
