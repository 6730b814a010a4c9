"""Regions: blocks of a tensor, and the overlaps of intervals of flattened regions.

Tensor and expert parallelism cut a tensor along dims. Data parallelism flattens the part that is left, and
cuts it at any element. Blocks undo both: an interval of a flattened region consists of few blocks of the
tensor, each block is consecutive in the interval, and the overlap of two blocks is a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from shoal.errors import CheckpointError

__all__ = ["Region", "Run", "overlaps", "runs"]


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
