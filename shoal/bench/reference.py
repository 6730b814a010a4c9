"""The inputs and the right results of collectives, for the check of the bench.

Rank r's element i is the (i mod 1021)-th of r's own 1021 random whole numbers. So each rank can compute any
part of any rank's input without communication. A block in the wrong place is noticed, because 1021 is a prime
and divides no block by chance. A sum over ranks is again 1021 numbers repeated. The numbers are so small that
sums over up to 96 ranks are exact in every type.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.bench.collective import Collective, Extent

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
