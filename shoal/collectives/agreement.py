"""What the ranks of a group are about to do, compared: SHOAL_DEBUG=1."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.collectives.calls import COLLECTIVE_NUMBERS, DTYPE_NAMES, REDUCTION_NAMES
from shoal.collectives.core import Call

__all__ = ["describe_call", "first_difference"]

_NAMES = {number: name for name, number in COLLECTIVE_NUMBERS.items()}
_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_REDUCING = ("all_reduce", "reduce_scatter", "reduce")


def describe_call(call: Call) -> list[int]:
    """What has to be the same on all ranks."""
    return [call.collective, call.dtype, call.reduction, call.root, call.bytes]


def first_difference(
    own: Sequence[int], everyone: Sequence[Sequence[int]], rank: int
) -> tuple[int, str] | None:
    """The first rank that is about to do something else than this one, and how it differs, if any is."""
    for other, theirs in enumerate(everyone):
        if list(theirs) != list(own):
            return other, f"rank {other} calls {_text(theirs)} where rank {rank} calls {_text(own)}"
    return None


def _text(told: Sequence[int]) -> str:
    collective, dtype, reduction, root, nbytes = told
    name = _NAMES.get(collective, f"collective {collective}")
    text = f"{name} of {nbytes} bytes"
    if name in _REDUCING:
        text += f" of {DTYPE_NAMES[dtype]}, {REDUCTION_NAMES[reduction]}"
    if name in _ROOTED:
        text += f", root {root}"
    return text
