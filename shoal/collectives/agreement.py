"""What the ranks of a group are about to do, compared: SHOAL_DEBUG=1."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Sequence

import torch

from shoal.collectives.codes import COLLECTIVE_NUMBERS, REDUCTION_NAMES
from shoal.collectives.core import Call

__all__ = ["describe_call", "first_difference", "first_uneven_split"]

_NAMES = {number: name for name, number in COLLECTIVE_NUMBERS.items()}
_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_REDUCING = ("all_reduce", "reduce_scatter", "reduce")
_DTYPES = sorted({str(each) for each in vars(torch).values() if isinstance(each, torch.dtype)})


def describe_call(call: Call, tensor: torch.Tensor | None) -> list[int]:
    """What has to be the same on all ranks.

    Args:
        call: What is about to begin.
        tensor: Of the type that is moved; None of a barrier.
    """
    dtype = _DTYPES.index(str(tensor.dtype)) if tensor is not None else -1
    return [call.collective, dtype, call.reduction, call.root, call.bytes, *_describe_stripes(call)]


def _describe_stripes(call: Call) -> tuple[int, int]:
    """How many stripes there are, and a number for where they lie; (-1, 0) where a tensor is one."""
    if call.stripes is None:
        return -1, 0
    numbers = (ctypes.c_uint64 * (2 * call.stripe_count)).from_address(call.stripes)
    return call.stripe_count, zlib.crc32(bytes(numbers))


def first_difference(calls: Sequence[Sequence[int]], rank: int) -> tuple[int, str] | None:
    """The first rank that is about to do something else than this one, and how it differs; None if none is.

    Args:
        calls: What each rank is about to do, as `describe_call` has it.
        rank: This one.
    """
    own = calls[rank]
    for other, theirs in enumerate(calls):
        if theirs != own:
            return other, f"rank {other} calls {_text(theirs)} where rank {rank} calls {_text(own)}"
    return None


def first_uneven_split(splits: Sequence[Sequence[int]]) -> tuple[int, str] | None:
    """The first rank that sends another something else than that one expects; None if none does.

    Args:
        splits: Of each rank, the bytes to all ranks and then those from all ranks.
    """
    size = len(splits)
    for sender in range(size):
        for receiver in range(size):
            sent, expected = splits[sender][receiver], splits[receiver][size + sender]
            if sent != expected:
                return sender, (
                    f"rank {sender} calls all_to_all with {sent} bytes to rank {receiver}, "
                    f"which calls all_to_all with {expected} bytes from there"
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
