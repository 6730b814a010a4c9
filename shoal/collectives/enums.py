"""The numbers by which the native core knows collectives, algorithms, types and reductions."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import torch
from torch.distributed.distributed_c10d import ReduceOp

from shoal.collectives.options import Options
from shoal.collectives.table import Call
from shoal.errors import CollectiveError
from shoal.predict.cost import ALGORITHMS


def refusal(given: str, *, possible: str, change: str) -> CollectiveError:
    """Return the error for a call that cannot be served. Nothing was sent, and the group goes on.

    Args:
        given: The operand that was given, and why it cannot work.
        possible: The operands that would be accepted.
        change: The change to make, as an instruction.
    """
    return CollectiveError(f"{given}\n  possible: {possible}\n  change: {change}", fault="invalid")


def described(tensor: torch.Tensor) -> str:
    """Return the type and shape of a tensor, such as "float32 [2, 3]"."""
    return f"{type_name(tensor.dtype)} {list(tensor.shape)}"


def type_name(dtype: torch.dtype) -> str:
    """Return the name of a type, such as "float32"."""
    return str(dtype).removeprefix("torch.")


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
    "in-network": 9,
}

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
_COMPLEX = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
"""The real type of each complex type: sums add the two real numbers."""

MOVED = _DTYPES[torch.uint8]
"""Number of the type that moves bytes, where nothing is reduced."""

_Kind: Any = ReduceOp.RedOpType  # its members come from the native module, which has no types

_REDUCTIONS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR")
"""Names of reductions; the index is the core's number."""


def _defined_on(dtype: torch.dtype) -> tuple[str, ...]:
    if dtype in _COMPLEX:
        return ("SUM", "AVG")
    if dtype.is_floating_point:
        return ("SUM", "AVG", "MIN", "MAX", "PRODUCT")
    return ("SUM", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR")


_NUMBERS = {  # by the hash of the ReduceOp: it equals the kind's hash, and is three times as fast to read
    (hash(ReduceOp(_Kind.__members__[name])), dtype): (
        _DTYPES[_COMPLEX.get(dtype, dtype)],
        _REDUCTIONS.index(name),
    )
    for dtype in (*_DTYPES, *_COMPLEX)
    for name in _defined_on(dtype)
}

DTYPE_NAMES = {number: str(dtype).removeprefix("torch.") for dtype, number in _DTYPES.items()}
REDUCTION_NAMES = dict(enumerate(_REDUCTIONS))


def reduction_numbers(op: Any, dtype: torch.dtype) -> tuple[int, int]:
    """Return the core's numbers of a type and of a reduction, which is c10d's ReduceOp.

    Raises:
        CollectiveError: The type does not have this reduction.
    """
    numbers = _NUMBERS.get((hash(op), dtype))
    if numbers is None:
        raise _undefined(op.op.name, dtype)
    return numbers


def _undefined(name: str, dtype: torch.dtype) -> CollectiveError:
    text = type_name(dtype)
    if dtype not in _DTYPES and dtype not in _COMPLEX:
        return refusal(
            f"{text} cannot be reduced between CPUs",
            possible=", ".join(type_name(each) for each in (*_DTYPES, *_COMPLEX)),
            change="convert the tensor, for example with .to(torch.float32)",
        )
    change = "use one of these, or another type"
    if name == "AVG":  # an integer cannot hold the average; some backends round it, which hides that
        change = "average the tensor as float64, or sum it as int64 and divide by the number of ranks"
    return refusal(
        f"there is no {name} of {text} between CPUs", possible=", ".join(_defined_on(dtype)), change=change
    )


class Chooser:
    """Chooses the algorithm of a group for each collective and size.

    Args:
        options: The forced algorithms, and the table of costs.
        one_shot_bytes: Largest number of bytes that one rank may put into its slot for one-shot.
        ranks: Number of ranks in the group.
        hosts: Number of hosts that the ranks are on.
        turns: Number of ranks that share a core, on one host: 1 if each has a core of its own.
    """

    def __init__(self, options: Options, one_shot_bytes: int, ranks: int, hosts: int, turns: int = 1) -> None:
        self._options = options
        self._one_shot_bytes = one_shot_bytes
        self._ranks = ranks
        self._hosts = hosts
        self._turns = turns
        self._bounds: dict[tuple[str, int], tuple[tuple[float, ...], tuple[str, ...]]] = {}

    def choose(self, collective: str, nbytes: int, slot: int, widening: int = 1) -> str:
        """Return the name of the algorithm.

        Args:
            collective: One of `COLLECTIVE_NUMBERS`, without the barrier.
            nbytes: Bytes of the whole buffer, as shoal.predict.cost.collectives.algorithms defines it.
            slot: Bytes that one rank would have to put into its slot for one-shot.
            widening: 2 for sums of 16-bit floats, which some algorithms pass on as 32-bit floats.
        """
        key = collective, widening
        if key not in self._bounds:
            self._bounds[key] = self._envelope(collective, widening)
        bounds, names = self._bounds[key]
        name = names[bisect_right(bounds, nbytes)]
        if name == "one-shot" and slot > self._one_shot_bytes:
            return "two-shot" if collective == "all_reduce" else "direct"
        return name

    def _envelope(self, collective: str, widening: int) -> tuple[tuple[float, ...], tuple[str, ...]]:
        level = "shared-memory" if self._hosts == 1 else "network"
        forced = self._options.algorithms.get(collective)
        # Within a host the core also has the network algorithms, through byte rings in shared memory; but no
        # aggregator stands between its ranks.
        possible = (collective, forced, level) in ALGORITHMS or (self._hosts == 1 and forced != "in-network")
        if forced is not None and possible:
            return (), (forced,)
        aggregated = bool(self._options.aggregator)
        call = Call(collective, level, self._ranks, self._hosts, widening, self._turns, aggregated)
        choices = self._options.table.choices(call)
        return choices.bounds, choices.names
