"""The collectives that the bench measures: their buffers and bus factors.

The inputs and the right results of collectives, for the check of the bench.

Rank r's element i is the (i mod 1021)-th of r's own 1021 random whole numbers. So each rank can compute any
part of any rank's input without communication. A block in the wrong place is noticed, because 1021 is a prime
and divides no block by chance. A sum over ranks is again 1021 numbers repeated. The numbers are so small that
sums over up to 96 ranks are exact in every type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from statistics import median
from typing import Any

import torch
from torch import Tensor


class Extent(Enum):
    """The part of a collective's size that one buffer of one rank holds."""

    NONE = "none"
    PART = "part"
    """The share of one rank: the size divided by the ranks."""
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective.

    Its size is that of the whole, as in nccl-tests: the bytes that all ranks together contribute to a
    gather, or hold after a scatter; elsewhere the bytes that each rank holds.

    Attributes:
        name: Name in `torch.distributed`; `send_recv` sends to the next rank and receives from the previous.
        input: Extent of the buffer that a rank gives; NONE if the operation is in place, in `output`.
        output: Extent of the buffer that a rank gets.
        reduces: Whether values are combined, so that the operator matters.
        bus_factor: Function that gives, for a number of ranks, busbw over algbw: the share of the size that
            the busiest link must carry with any algorithm. With it, rates of different collectives and
            numbers of ranks can be compared with each other and with the link.
    """

    name: str
    input: Extent
    output: Extent
    reduces: bool
    bus_factor: Callable[[int], float]

    @property
    def divides(self) -> bool:
        """Whether the elements must divide evenly over the ranks."""
        return Extent.PART in (self.input, self.output) or self.name == "all_to_all"


def _both_ways(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


def _all_but_own(ranks: int) -> float:
    return (ranks - 1) / ranks


def _everything(ranks: int) -> float:
    return 1.0


_NONE, _PART, _WHOLE = Extent.NONE, Extent.PART, Extent.WHOLE

COLLECTIVES: Mapping[str, Collective] = {
    collective.name: collective
    for collective in (
        Collective("all_reduce", _NONE, _WHOLE, True, _both_ways),
        Collective("all_gather", _PART, _WHOLE, False, _all_but_own),
        Collective("reduce_scatter", _WHOLE, _PART, True, _all_but_own),
        Collective("all_to_all", _WHOLE, _WHOLE, False, _all_but_own),
        Collective("broadcast", _NONE, _WHOLE, False, _everything),
        Collective("reduce", _NONE, _WHOLE, True, _everything),
        Collective("gather", _PART, _WHOLE, False, _all_but_own),
        Collective("scatter", _WHOLE, _PART, False, _all_but_own),
        Collective("send_recv", _WHOLE, _WHOLE, False, _everything),
        Collective("barrier", _NONE, _NONE, False, _everything),
    )
}
"""Collectives by name, in the order of measurement. The root, where there is one, is rank 0."""


_PERIOD = 1021
_LARGEST_SUM = 96  # over all ranks: exact in int8, and in bfloat16, where integers up to 256 are exact


def given(
    collective: Collective, count: int, ranks: int, rank: int, *, dtype: torch.dtype, op: str
) -> Tensor:
    """Return a rank's input, with the extent of the input, or of the output if the collective is in place.

    Args:
        collective: The collective.
        count: Elements of the whole.
        ranks: Number of ranks.
        rank: The rank that gives it.
        dtype: Type of the elements.
        op: Name of the operator.
    """
    extent = collective.output if collective.input is Extent.NONE else collective.input
    elements = count // ranks if extent is Extent.PART else count
    return _repeat(_pattern(ranks, rank, op), 0, elements, dtype)


def expected(
    collective: Collective, count: int, ranks: int, rank: int, *, dtype: torch.dtype, op: str
) -> Tensor | None:
    """Return the right output of a rank; None if the implementation may leave anything there.

    Args:
        collective: The collective.
        count: Elements of the whole.
        ranks: Number of ranks.
        rank: The rank that holds it.
        dtype: Type of the elements.
        op: Name of the operator.
    """
    part = count // ranks

    def of_rank(other: int, start: int, elements: int) -> Tensor:
        return _repeat(_pattern(ranks, other, op), start, elements, dtype)

    def of_all(start: int, elements: int) -> Tensor:
        return _repeat(_reduced(ranks, op), start, elements, dtype)

    match collective.name:
        case "all_reduce":
            return of_all(0, count)
        case "reduce":
            return of_all(0, count) if rank == 0 else None
        case "reduce_scatter":
            return of_all(rank * part, part)
        case "all_gather":
            return torch.cat([of_rank(other, 0, part) for other in range(ranks)])
        case "gather":
            return torch.cat([of_rank(other, 0, part) for other in range(ranks)]) if rank == 0 else None
        case "all_to_all":
            return torch.cat([of_rank(other, rank * part, part) for other in range(ranks)])
        case "broadcast":
            return of_rank(0, 0, count)
        case "scatter":
            return of_rank(0, rank * part, part)
        case "send_recv":
            return of_rank((rank - 1) % ranks, 0, count)
    return None


def _pattern(ranks: int, rank: int, op: str) -> Tensor:
    """Return the whole numbers of one rank, shape [_PERIOD]."""
    generator = torch.Generator().manual_seed(rank)
    if op == "product":
        return torch.randint(1, 3, (_PERIOD,), generator=generator)
    most = max(1, min(7, _LARGEST_SUM // ranks))
    numbers = torch.randint(0, most + 1, (_PERIOD,), generator=generator)
    if op == "avg":  # multiples of the number of ranks, so that averages are whole numbers
        return numbers.clamp(max=1) * ranks
    return numbers


def _reduced(ranks: int, op: str) -> Tensor:
    patterns = torch.stack([_pattern(ranks, rank, op) for rank in range(ranks)])
    match op:
        case "sum":
            return patterns.sum(0)
        case "avg":
            return patterns.sum(0) // ranks
        case "min":
            return patterns.amin(0)
        case "max":
            return patterns.amax(0)
        case "product":
            return patterns.prod(0)
    raise AssertionError(op)


def _repeat(pattern: Tensor, start: int, elements: int, dtype: torch.dtype) -> Tensor:
    """Return elements from `start` on of the pattern, repeated without end."""
    turned = pattern.roll(-(start % _PERIOD)).to(dtype)
    return turned.repeat(-(-elements // _PERIOD))[:elements]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The turns of one contestant.

    Attributes:
        collective: Name of the collective.
        backend: Name of the contestant.
        ranks: Number of ranks.
        bytes: Bytes of the whole; 0 for a barrier.
        count: Elements of the whole.
        dtype: Name of the element type.
        op: Name of the operator; None where nothing is reduced.
        iterations: Operations in a turn.
        seconds: Seconds of one operation, by round; empty if there was a problem.
        wrong: Number of wrong elements over all ranks; None if nothing was checked.
        problem: Reason why the contestant does not do this; None if it does.
        fresh: Whether each operation used new tensors; otherwise all used the same tensors.
    """

    collective: str
    backend: str
    ranks: int
    bytes: int
    count: int
    dtype: str
    op: str | None
    iterations: int
    seconds: tuple[float, ...]
    wrong: int | None
    problem: str | None
    fresh: bool = False

    @property
    def median(self) -> float:
        """Seconds of one operation, in the median round."""
        return median(self.seconds)

    @property
    def algbw(self) -> float:
        """Bytes a second: the size over the time."""
        return self.bytes / self.median

    @property
    def busbw(self) -> float:
        """Bytes a second over the busiest link, whatever the algorithm: algbw times the bus factor."""
        return self.algbw * COLLECTIVES[self.collective].bus_factor(self.ranks)

    def as_json(self) -> dict[str, Any]:
        """The row for JSON: times in seconds, rates in bytes a second."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        if self.seconds:
            fields |= {"median": self.median, "algbw": self.algbw, "busbw": self.busbw}
        return fields


def ratio(row: Row, to: Row) -> float | None:
    """Return a row's time over another's: the median of the ratios in each round.

    Ratios are taken in each round, because the state of the machine at one moment affects both rows equally.
    None if one row has no times.
    """
    if not row.seconds or not to.seconds:
        return None
    return median(own / other for own, other in zip(row.seconds, to.seconds, strict=True))
