"""The numbers by which the native core knows collectives, algorithms, types and reductions."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import torch
from torch.distributed.distributed_c10d import ReduceOp

from shoal.collectives.options import Options
from shoal.collectives.table import Call
from shoal.cost import ALGORITHMS
from shoal.errors import CollectiveError

__all__ = [
    "ALGORITHM_NUMBERS",
    "COLLECTIVE_NUMBERS",
    "DTYPE_NAMES",
    "MOVED",
    "REDUCTION_NAMES",
    "Chooser",
    "dtype_number",
    "reduction_number",
]

COLLECTIVE_NUMBERS = {
    "barrier": 0,
    "all_reduce": 1,
    "all_gather": 2,
    "reduce_scatter": 3,
    "broadcast": 4,
    "reduce": 5,
    "gather": 6,
    "scatter": 7,
    "all_to_all": 8,
}

ALGORITHM_NUMBERS = {
    "one-shot": 0,
    "direct": 1,
    "two-shot": 1,
    "ring": 2,
    "halving-doubling": 3,
    "recursive": 3,
    "double-tree": 4,
    "hierarchical": 5,
    "tree": 6,
    "chain": 7,
    "pairwise": 8,
}

SLOT_BYTES = 256 * 1024
"""What one rank may put into its slot: the limit of one-shot (csrc/transport/board.h)."""

_DTYPES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.int8: 4,
    torch.uint8: 5,
    torch.int16: 6,
    torch.int32: 7,
    torch.int64: 8,
    torch.bool: 9,
}

MOVED = _DTYPES[torch.uint8]
"""The type's number where nothing is reduced: bytes are moved."""

_Kind: Any = ReduceOp.RedOpType  # its members are the native module's, which has no types

_REDUCTIONS = {
    kind.value: number  # by value, which is looked up six times as fast as a member
    for number, kind in enumerate(
        (_Kind.SUM, _Kind.AVG, _Kind.MIN, _Kind.MAX, _Kind.PRODUCT, _Kind.BAND, _Kind.BOR, _Kind.BXOR)
    )
}
_BITWISE = (5, 6, 7)

DTYPE_NAMES = {number: str(dtype).removeprefix("torch.") for dtype, number in _DTYPES.items()}
REDUCTION_NAMES = {number: _Kind(value).name for value, number in _REDUCTIONS.items()}


def dtype_number(dtype: torch.dtype) -> int:
    """The number of a type that can be reduced.

    Raises:
        CollectiveError: It is none of these.
    """
    try:
        return _DTYPES[dtype]
    except KeyError:
        names = ", ".join(str(each).removeprefix("torch.") for each in _DTYPES)
        raise CollectiveError(
            f"{dtype} cannot be reduced; types that can: {names}", fault="invalid"
        ) from None


def reduction_number(op: Any, dtype: torch.dtype) -> int:
    """The number of a reduction, which is c10d's ReduceOp.

    Raises:
        CollectiveError: There is none for the type.
    """
    number = _REDUCTIONS.get(op.op.value)
    if number is None:
        raise CollectiveError(f"there is no reduction {op.op.name} between CPUs", fault="invalid")
    if number in _BITWISE and dtype.is_floating_point:
        raise CollectiveError(f"{op.op.name} is not defined on {dtype}", fault="invalid")
    return number


class Chooser:
    """Which algorithm a group uses, for each collective and size.

    Args:
        options: What is forced, and the table of costs.
        ranks: Of the group.
        hosts: On which they are.
    """

    def __init__(self, options: Options, ranks: int, hosts: int) -> None:
        self._options = options
        self._ranks = ranks
        self._hosts = hosts
        self._bounds: dict[tuple[str, int], tuple[tuple[float, ...], tuple[str, ...]]] = {}

    def choose(self, collective: str, nbytes: int, slot: int, widening: int = 1) -> str:
        """The algorithm's name.

        Args:
            collective: One of `COLLECTIVE_NUMBERS`, but for the barrier.
            nbytes: Of the whole buffer, as shoal.cost.collectives defines it.
            slot: What one rank would have to put into its slot for one-shot, in bytes.
            widening: 2 for sums of 16-bit floats, which some algorithms pass on as 32-bit ones.
        """
        key = collective, widening
        if key not in self._bounds:
            self._bounds[key] = self._envelope(collective, widening)
        bounds, names = self._bounds[key]
        name = names[bisect_right(bounds, nbytes)]
        if name == "one-shot" and slot > SLOT_BYTES:
            return "two-shot" if collective == "all_reduce" else "direct"
        return name

    def _envelope(self, collective: str, widening: int) -> tuple[tuple[float, ...], tuple[str, ...]]:
        level = "shared-memory" if self._hosts == 1 else "network"
        forced = self._options.algorithms.get(collective)
        # Within a host the core has those of the network too, through rings of bytes in shared memory.
        if forced is not None and (self._hosts == 1 or (collective, forced, level) in ALGORITHMS):
            return (), (forced,)
        choices = self._options.table.choices(Call(collective, level, self._ranks, self._hosts, widening))
        return choices.bounds, choices.names
