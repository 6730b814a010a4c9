"""What a rank's device does in each round of a collective in the memory of one device (`one_device.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from shoal.collectives.operation import Operation

SUMMED_AS = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}
"""The types that can be summed, and the type in which they are."""

Kernel = Callable[[], object]
Buffers = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Round:
    """Work of the device between meetings of all ranks.

    Attributes:
        put: Copies the operand to the own buffer; None for a rank that gives nothing.
        fold: Sums a part of all buffers into the own one; None if nobody does.
        take: Copies from all buffers to the result, or sums; None for a rank that gets nothing.
    """

    put: Kernel | None
    fold: Kernel | None
    take: Kernel | None


def rounds(operation: Operation, buffers: Buffers, rank: int, *, is_average: bool) -> Iterator[Round]:
    """Yield the rounds of a collective.

    Args:
        operation: The collective, one of `COLLECTIVES`; of stripes, one that gathers or scatters.
        buffers: Each rank's buffer: uint8, of one size, which is a multiple of the operand's elements.
        rank: This rank.
        is_average: Whether sums are divided by the number of ranks.
    """
    of_kind = COLLECTIVES if operation.stripes is None else _OF_STRIPES
    return of_kind[operation.collective](operation, buffers, rank, is_average)


def _all_reduce(operation: Operation, buffers: Buffers, rank: int, is_average: bool) -> Iterator[Round]:
    assert operation.input is not None
    assert operation.output is not None
    typed = [buffer.view(operation.input.dtype) for buffer in buffers]
    capacity = typed[rank].numel()
    sources, results = _flat(operation.input).split(capacity), _flat(operation.output).split(capacity)
    for source, result in zip(sources, results, strict=True):
        whole = [each[: source.numel()] for each in typed]
        share = -(-source.numel() // len(buffers))
        own = slice(rank * share, (rank + 1) * share)
        sums = [whole[index][index * share : (index + 1) * share] for index in range(len(buffers))]
        yield Round(
            partial(whole[rank].copy_, source),
            partial(_sum, [each[own] for each in whole], sums[rank], is_average),
            partial(torch.cat, sums, out=result),
        )


def _reduce_scatter(operation: Operation, buffers: Buffers, rank: int, is_average: bool) -> Iterator[Round]:
    assert operation.input is not None
    assert operation.output is not None
    size, result = len(buffers), _flat(operation.output)
    typed = [buffer.view(operation.input.dtype) for buffer in buffers]
    width = typed[rank].numel() // size
    sources = _flat(operation.input).view(size, result.numel()).split(width, dim=1)
    for source, part in zip(sources, result.split(width), strict=True):
        parts = [each[: source.numel()].view(source.shape) for each in typed]
        own = [each[rank] for each in parts]
        yield Round(partial(parts[rank].copy_, source), None, partial(_sum, own, part, is_average))


def _all_gather(operation: Operation, buffers: Buffers, rank: int, is_average: bool) -> Iterator[Round]:
    assert operation.input is not None
    assert operation.output is not None
    source = _bytes(operation.input)
    capacity = buffers[rank].numel()
    results = _bytes(operation.output).view(len(buffers), source.numel()).split(capacity, dim=1)
    for part, result in zip(source.split(capacity), results, strict=True):
        parts = [each[: part.numel()] for each in buffers]
        yield Round(partial(parts[rank].copy_, part), None, partial(_copy_all, parts, result))


def _broadcast(operation: Operation, buffers: Buffers, rank: int, is_average: bool) -> Iterator[Round]:
    assert operation.input is not None
    buffer = buffers[operation.root]
    for part in _bytes(operation.input).split(buffer.numel()):
        given = buffer[: part.numel()]
        if rank == operation.root:
            yield Round(partial(given.copy_, part), None, None)
        else:
            yield Round(None, None, partial(part.copy_, given))


class _Piece(NamedTuple):
    """Elements of a stripe, equally many of each rank's part: rank i's begin at `first + i * part`."""

    first: int
    part: int
    elements: int

    def of(self, buffer: torch.Tensor, rank: int) -> torch.Tensor:
        begin = self.first + rank * self.part
        return buffer[begin : begin + self.elements]


def _pieces(operation: Operation, width: int) -> Iterator[list[_Piece]]:
    """Yield the pieces of all stripes, as many for each round as have `width` elements of a rank together."""
    assert operation.input is not None
    assert operation.stripes is not None
    element, pieces, room = operation.input.element_size(), list[_Piece](), width
    for first, part in operation.stripes.positions:
        at, end = first // element, (first + part) // element
        while at < end:
            pieces.append(_Piece(at, part // element, min(end - at, room)))
            at += pieces[-1].elements
            room -= pieces[-1].elements
            if room == 0:
                yield pieces
                pieces, room = [], width
    if pieces:
        yield pieces


def _all_gather_stripes(
    operation: Operation, buffers: Buffers, rank: int, is_average: bool
) -> Iterator[Round]:
    """Put the own pieces one after another, and take those of the others: few kernels for many tensors."""
    assert operation.input is not None
    buffer = _flat(operation.input)
    typed = [each.view(buffer.dtype) for each in buffers]
    others = [other for other in range(len(buffers)) if other != rank]
    for pieces in _pieces(operation, typed[rank].numel()):
        counts = [each.elements for each in pieces]
        packed = [each[: sum(counts)].split(counts) for each in typed]
        yield Round(
            partial(torch._foreach_copy_, packed[rank], [each.of(buffer, rank) for each in pieces]),
            None,
            partial(
                torch._foreach_copy_,
                [each.of(buffer, other) for other in others for each in pieces],
                [part for other in others for part in packed[other]],
            ),
        )


def _reduce_scatter_stripes(
    operation: Operation, buffers: Buffers, rank: int, is_average: bool
) -> Iterator[Round]:
    """Put all pieces, rank by rank, and take the sum of the own ones."""
    assert operation.input is not None
    buffer, size = _flat(operation.input), len(buffers)
    typed = [each.view(buffer.dtype) for each in buffers]
    for pieces in _pieces(operation, typed[rank].numel() // size):
        counts = [each.elements for each in pieces]
        width = sum(counts)
        rows = [each[: size * width].view(size, width) for each in typed]
        yield Round(
            partial(
                torch._foreach_copy_,
                [part for row in rows[rank] for part in row.split(counts)],
                [each.of(buffer, other) for other in range(size) for each in pieces],
            ),
            None,
            partial(
                _sum_apart,
                [each[rank] for each in rows],
                rank,
                [each.of(buffer, rank) for each in pieces],
                is_average,
            ),
        )


_OF_STRIPES = {"all_gather": _all_gather_stripes, "reduce_scatter": _reduce_scatter_stripes}

COLLECTIVES = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
}


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.data.view(-1)  # what is written is not counted as a change, as with other backends


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return _flat(tensor).view(torch.uint8)


def _sum(parts: Sequence[torch.Tensor], to: torch.Tensor, is_average: bool) -> None:
    """Write the sum of the parts, in their order, to a tensor that may be one of them."""
    total = parts[0].to(SUMMED_AS[to.dtype]) + parts[1]
    for part in parts[2:]:
        total += part
    if is_average:
        total /= len(parts)
    to.copy_(total)


def _sum_apart(parts: Sequence[torch.Tensor], rank: int, to: list[torch.Tensor], is_average: bool) -> None:
    """Copy the sum of the parts to tensors that together are as long; nobody else reads this rank's part."""
    _sum(parts, parts[rank], is_average)
    torch._foreach_copy_(to, parts[rank].split([each.numel() for each in to]))


def _copy_all(parts: Sequence[torch.Tensor], to: torch.Tensor) -> None:
    for part, row in zip(parts, to, strict=True):
        row.copy_(part)
