"""Pieces of tensors, the regions that they lie in, their overlaps, and whether they cover a tensor.

Tensor and expert parallelism cut a tensor along dims: what is left on a rank is a region. Data parallelism
flattens the region, and cuts it at any element: what is left is a piece, an interval of a flattened region.
Blocks undo both: a piece consists of few blocks of the tensor, each block is consecutive in the piece, and
the overlap of two blocks is a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from shoal.errors import CheckpointError

_Span = tuple[int, int]
_Range = tuple[int, int]
_Block = tuple[_Range, ...]
"""First index, and one past the last index, along each dim."""


@dataclass(frozen=True, slots=True)
class Region:
    """The indices [offset, offset + shape) of a tensor, along each of its dims.

    Attributes:
        offset: The first index along each dim.
        shape: Number of indices along each dim.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """Return the region that is all of a tensor of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def end(self) -> tuple[int, ...]:
        """One past the last index, along each dim."""
        return tuple(first + length for first, length in zip(self.offset, self.shape, strict=True))

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return "[" + ",".join(f"{a}:{b}" for a, b in zip(self.offset, self.end, strict=True)) + "]"

    def narrow(self, dim: int, offset: int, length: int) -> Region:
        """Return `length` indices of `dim` from `offset` on of this region, as `torch.narrow` does.

        Raises:
            CheckpointError: This region has no such part.
        """
        if not (0 <= dim < len(self.shape) and offset >= 0 and 0 <= length <= self.shape[dim] - offset):
            raise CheckpointError(
                f"block of shape {list(self.shape)} has no indices [{offset}, {offset + length}) of dim {dim}"
            )
        return Region(
            (*self.offset[:dim], self.offset[dim] + offset, *self.offset[dim + 1 :]),
            (*self.shape[:dim], length, *self.shape[dim + 1 :]),
        )

    def is_inside(self, shape: Sequence[int]) -> bool:
        """Return whether a tensor of `shape` has this region."""
        return len(self.offset) == len(self.shape) == len(shape) and all(
            first >= 0 and 0 <= length <= whole - first
            for first, length, whole in zip(self.offset, self.shape, shape, strict=True)
        )

    def first_element(self, shape: Sequence[int]) -> int | None:
        """Return where this region begins in a flattened tensor of `shape`; None if not consecutive there."""
        cut = next((dim for dim, length in enumerate(self.shape) if length != 1), len(shape))
        if self.shape[cut + 1 :] != tuple(shape[cut + 1 :]):
            return None
        first = 0
        for offset, length in zip(self.offset, shape, strict=True):
            first = first * length + offset
        return first

    def overlap(self, other: Region) -> Region | None:
        """Return the overlap of two regions of a tensor; None if they do not overlap."""
        offset = tuple(map(max, self.offset, other.offset))
        shape = tuple(end - first for first, end in zip(offset, map(min, self.end, other.end), strict=True))
        return Region(offset, shape) if all(length > 0 for length in shape) else None


@dataclass(frozen=True, eq=False)
class Piece:
    """The half-open interval [start, stop) of a global tensor, or of a region of it, flattened row by row.

    The region is the part of a tensor that tensor or expert parallelism leaves on this rank. The interval is
    the part of the region that data parallelism leaves: all of it, some rows, or any elements of a flat
    bucket.

    Args:
        name: Name of the global tensor, such as "model/blocks.0.attention.query.weight".
        shape: Shape of the global tensor; `()` for a scalar.
        start: The first element that this rank holds, counted in the region.
        stop: One past the last element that it holds.
        tensor: The `stop - start` elements, contiguous, of any shape and on any device. Saving reads it,
            loading fills it.
        region: The block of the tensor that this rank holds a part of; None: all of the tensor.
        is_constant: Whether training leaves it as it is, so that it is stored apart and mostly written once.

    Raises:
        CheckpointError: The interval or the region is not inside the shape, or `tensor` is not its elements.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    tensor: torch.Tensor
    region: Region | None = None
    is_constant: bool = False

    def __post_init__(self) -> None:
        if self.region is not None and not self.region.is_inside(self.shape):
            raise CheckpointError(
                f"region {self.region} of {self.name!r} is not inside its shape {list(self.shape)}"
            )
        size = self.block.elements
        if not 0 <= self.start <= self.stop <= size:
            raise CheckpointError(
                f"piece [{self.start}, {self.stop}) of {self.name!r} is not inside its {size} elements"
            )
        if self.tensor.numel() != self.stop - self.start:
            raise CheckpointError(
                f"piece [{self.start}, {self.stop}) of {self.name!r} "
                f"comes with a tensor of {self.tensor.numel()} elements"
            )
        if not self.tensor.is_contiguous():
            raise CheckpointError(f"the tensor of a piece of {self.name!r} is not contiguous")

    @property
    def block(self) -> Region:
        """Return the region; without one, all of the tensor."""
        return Region.whole(self.shape) if self.region is None else self.region

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> Piece:
        """Return the piece that is the whole of `tensor`."""
        return cls(name, tuple(tensor.shape), 0, tensor.numel(), tensor)


@dataclass(frozen=True, slots=True)
class Run:
    """A block of a tensor whose elements are consecutive in a piece.

    Attributes:
        first: The block's first element in the piece.
        block: The block's region in the tensor.
    """

    first: int
    block: Region

    def first_of(self, part: Region) -> int | None:
        """Return the place in the piece where `part`, a region within the block, begins.

        None: its elements are not consecutive there.
        """
        place, has_begun = 0, False
        for inner, outer, length, whole in zip(
            part.offset, self.block.offset, part.shape, self.block.shape, strict=True
        ):
            if has_begun and length != whole:
                return None
            has_begun = has_begun or length > 1
            place = place * whole + inner - outer
        return self.first + place

    def view(self, flat: torch.Tensor, part: Region) -> torch.Tensor:
        """Return the elements of `part`, a region within the block, as a view of the piece's `flat`."""
        view = flat[self.first : self.first + self.block.elements].view(self.block.shape)
        for dim, (inner, outer) in enumerate(zip(part.offset, self.block.offset, strict=True)):
            view = view.narrow(dim, inner - outer, part.shape[dim])
        return view


def runs(region: Region, start: int, stop: int) -> Iterator[Run]:
    """Cut the elements [start, stop) of a flattened region into blocks, in order.

    There are at most `2 n - 1` blocks for `n` dims: one of whole rows, and at both ends a part of a row,
    which is cut in the same way.
    """
    for first, block in _blocks(region.shape, start, stop):
        offset = tuple(map(sum, zip(region.offset, block.offset, strict=True)))
        yield Run(first - start, Region(offset, block.shape))


def overlaps(
    one: tuple[Region, int, int], other: tuple[Region, int, int]
) -> Iterator[tuple[Run, Run, Region]]:
    """Yield the overlaps of two pieces of a tensor.

    Args:
        one: A region, and the interval [start, stop) of it, flattened.
        other: Another region, and its interval.

    Yields:
        A run of `one`, a run of `other`, and the region that both hold. These regions together have each
        common element of the two pieces once.
    """
    if one[0] == other[0]:  # two intervals of one region overlap in an interval
        line = Region.whole((one[0].elements,))
        one, other = (line, *one[1:]), (line, *other[1:])
    if _rows(*one).overlap(_rows(*other)) is None:
        return
    others = list(runs(*other))
    for run in runs(*one):
        for opposite in others:
            part = run.block.overlap(opposite.block)
            if part is not None:
                yield run, opposite, part


def _rows(region: Region, start: int, stop: int) -> Region:
    """Return the indices of a region's first dim that the elements [start, stop) touch."""
    if not region.elements or not region.shape:
        return region
    row = region.elements // region.shape[0]
    return region.narrow(0, start // row, -(-stop // row) - start // row)


def _blocks(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, Region]]:
    """Yield blocks of a tensor of `shape`, each with its first element in the flattened tensor."""
    if start >= stop:
        return
    if not shape:
        yield 0, Region((), ())
        return
    row = math.prod(shape[1:])
    first_whole, last_whole = -(-start // row), stop // row
    if first_whole > last_whole:  # the interval lies within one row
        yield from _within_row(shape, last_whole, start, stop)
        return
    yield from _within_row(shape, first_whole - 1, start, first_whole * row)
    if first_whole < last_whole:
        rows = Region.whole((last_whole - first_whole, *shape[1:]))
        yield first_whole * row, Region((first_whole, *rows.offset[1:]), rows.shape)
    yield from _within_row(shape, last_whole, last_whole * row, stop)


def _within_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[tuple[int, Region]]:
    before = index * math.prod(shape[1:])
    for first, block in _blocks(shape[1:], start - before, stop - before):
        yield before + first, Region((index, *block.offset), (1, *block.shape))


def check_coverage(name: str, shape: Sequence[int], pieces: Iterable[tuple[Region, int, int]]) -> None:
    """Check that the pieces of a tensor hold each of its elements exactly once.

    Intervals of the same region are joined first. Regions are compared only if a tensor has several. So the
    check is small, however many shards there are.

    Args:
        name: Name of the tensor.
        shape: Shape of the tensor.
        pieces: Regions, with the interval [start, stop) of each, flattened.

    Raises:
        CheckpointError: They do not; the message names the tensor and the first fault.
    """
    whole = Region.whole(shape)
    intervals: dict[Region, list[_Span]] = {}
    for region, start, stop in pieces:
        if not (region.is_inside(shape) and 0 <= start <= stop <= region.elements):
            raise CheckpointError(f"elements [{start}, {stop}) of block {region} are not in tensor {name!r}")
        intervals.setdefault(region, []).append((start, stop))
    if not intervals.keys() - {whole}:
        _check_joined(name, math.prod(shape), _join(name, intervals.get(whole, []), ""))
        return
    blocks = [
        tuple(zip(run.block.offset, run.block.end, strict=True))
        for region, spans in intervals.items()
        for start, stop in _join(name, spans, f"block {region} of ")
        for run in runs(region, start, stop)
    ]
    fault = _first_fault(shape, blocks)
    if fault is not None:
        block, count = fault
        place = ",".join(f"{first}:{last}" for first, last in block)
        how_many = "no piece" if count == 0 else "two pieces" if count == 2 else f"{count} pieces"
        raise CheckpointError(f"block [{place}] of tensor {name!r} is in {how_many}")


def _join(name: str, spans: Iterable[_Span], where: str) -> list[_Span]:
    """Join adjacent intervals."""
    joined: list[_Span] = []
    for start, stop in sorted(span for span in spans if span[0] < span[1]):
        reached = joined[-1][1] if joined else 0
        if start < reached:
            raise CheckpointError(
                f"elements [{start}, {min(stop, reached)}) of {where}tensor {name!r} are in two pieces"
            )
        if joined and start == reached:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def _check_joined(name: str, elements: int, spans: Sequence[_Span]) -> None:
    reached = 0
    for start, stop in (*spans, (elements, elements)):
        if start != reached:
            raise CheckpointError(f"elements [{reached}, {start}) of tensor {name!r} are in no piece")
        reached = stop


def _first_fault(shape: Sequence[int], blocks: Sequence[_Block]) -> tuple[_Block, int] | None:
    """Return the first part of a tensor that is not in exactly one block, and the number of its blocks.

    The tensor is cut into slabs where a block begins or ends along the first dim. Each slab is a tensor with
    one dim less, and belongs to the blocks that extend across it.
    """
    if not shape:
        return None if len(blocks) == 1 else ((), len(blocks))
    cuts = sorted({0, shape[0], *(edge for block in blocks for edge in block[0])})
    waiting = sorted(blocks, key=lambda block: block[0], reverse=True)
    across: list[_Block] = []
    for first, last in pairwise(cuts):
        across = [block for block in across if block[0][1] > first]
        while waiting and waiting[-1][0][0] == first:
            across.append(waiting.pop())
        fault = _first_fault(shape[1:], [block[1:] for block in across])
        if fault is not None:
            return ((first, last), *fault[0]), fault[1]
    return None
