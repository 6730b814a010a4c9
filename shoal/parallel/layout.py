"""The place of parameters in a bucket's buffer, and the shard to which each of their rows belongs.

A bucket is one flat buffer that holds several parameters one after another, each contiguous. A parameter is
cut along its first dim: with n shards, shard i has the i-th of n equal parts of its rows, as `torch.chunk`
and DTensor's `Shard(0)` cut them, so that the last shards may have fewer rows or none. In the buffer every
parameter has space for n full parts: a stripe, which collectives move as one (`shoal.collectives.Stripes`).
Each parameter starts at a multiple of `ALIGNMENT` elements, so that it is as well aligned as a separate
tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

ALIGNMENT = 16
"""Alignment in elements: 64 bytes in fp32, a cache line."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The block of a parameter that a rank of tensor or expert parallelism has.

    Attributes:
        shape: The whole parameter's shape.
        dim: The dim that is cut.
        offset: The block's first index along it.
        length: The block's length along it.
    """

    shape: tuple[int, ...]
    dim: int
    offset: int
    length: int

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Return the block's shape."""
        return (*self.shape[: self.dim], self.length, *self.shape[self.dim + 1 :])

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the block of a whole parameter, as a view."""
        return whole.narrow(self.dim, self.offset, self.length)


@dataclass(frozen=True, slots=True)
class Window:
    """Rows of a parameter in a flat buffer.

    Attributes:
        start: First element of the rows.
        stop: End of the rows: one past their last element.
        sizes: Sizes of the dims, in memory order.
        back: The permutation to the parameter's order of dims, if memory order differs; otherwise None.
    """

    start: int
    stop: int
    sizes: tuple[int, ...]
    back: tuple[int, ...] | None

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the rows `[rows, ...]` of a buffer, as a view."""
        rows = buffer[self.start : self.stop].view(self.sizes)
        return rows if self.back is None else rows.permute(self.back)


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one parameter in its bucket.

    Attributes:
        name: The parameter's name in the model.
        shape: The parameter's shape.
        order: The parameter's dims from the outermost in memory to the innermost; the first dim comes first.
        shards: Number of shards.
        offset: The parameter's first element in the bucket's buffer.
        packed: First element of a shard's part in a buffer where the parts of one shard lie one after
            another.
    """

    name: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    shards: int
    offset: int
    packed: int

    @property
    def elements(self) -> int:
        """Number of elements of the parameter."""
        return math.prod(self.shape)

    @property
    def row_elements(self) -> int:
        """Number of elements of a row: of one index of the first dim."""
        return math.prod(self.shape[1:])

    @property
    def part_elements(self) -> int:
        """Number of elements that each shard's part has room for."""
        return -(-self._all_rows // self.shards) * self.row_elements

    def interval(self, shard: int) -> tuple[int, int]:
        """Return first element and end of a shard's part, in the flattened parameter."""
        rows = self.rows(shard)
        return rows.start * self.row_elements, rows.stop * self.row_elements

    def rows(self, shard: int) -> range:
        """Return the rows of a shard's part."""
        return part_of_rows(self._all_rows, self.shards, shard)

    @property
    def _all_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    def window(self, first: int, rows: range | None = None) -> Window:
        """Return the window of rows, by default all, that lie in a buffer from element `first` on."""
        count = self._all_rows if rows is None else len(rows)
        sizes = (count, *(self.shape[dim] for dim in self.order[1:])) if self.shape else ()
        back = tuple(sorted(range(len(self.order)), key=self.order.__getitem__))
        is_plain = back == tuple(range(len(back)))
        return Window(first, first + count * self.row_elements, sizes, None if is_plain else back)


@dataclass(frozen=True)
class BucketLayout:
    """The slots of one bucket, and their cut into shards.

    Attributes:
        slots: One per parameter, in the order of the buffer.
        shards: Number of shards.
        elements: Length of the buffer of weights.
        packed_elements: Length of one shard's parts, one after another.
    """

    slots: tuple[Slot, ...]
    shards: int
    elements: int
    packed_elements: int

    @classmethod
    def of(
        cls, parameters: Iterable[tuple[str, tuple[int, ...], tuple[int, ...]]], shards: int
    ) -> BucketLayout:
        """Lay out parameters (name, shape, order of dims in memory) one after another, for `shards`."""
        slots, end, packed = [], 0, 0
        for name, shape, order in parameters:
            slot = Slot(name, shape, order, shards, end, packed)
            slots.append(slot)
            end = _round_up(end + shards * slot.part_elements, ALIGNMENT)
            packed = _round_up(packed + slot.part_elements, ALIGNMENT)
        return cls(tuple(slots), shards, end, packed)

    @property
    def gradient_elements(self) -> int:
        """Length of the buffer of gradients: at its end every rank says which gradients it had."""
        return self.elements + self.shards * len(self.slots)

    @cached_property
    def stripes(self) -> Sequence[tuple[int, int]]:
        """First element of each parameter in the buffer, and elements of a shard's part."""
        return [(slot.offset, slot.part_elements) for slot in self.slots if slot.elements]

    @cached_property
    def gradient_stripes(self) -> Sequence[tuple[int, int]]:
        """The stripes of the buffer of gradients."""
        return [*self.stripes, (self.elements, len(self.slots))]

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of a buffer that are the parameters, in their shapes."""
        return [window.of(buffer) for window in self._wholes]

    def parts(self, buffer: torch.Tensor, shard: int) -> list[torch.Tensor]:
        """Return one shard's rows of every parameter in a buffer."""
        return [window.of(buffer) for window in self._windows(shard)]

    def packed_parts(self, buffer: torch.Tensor, shard: int) -> list[torch.Tensor]:
        """Return one shard's rows of every parameter in a buffer `[packed_elements]` of this shard only."""
        return [slot.window(slot.packed, slot.rows(shard)).of(buffer) for slot in self.slots]

    def clear_gaps(self, buffer: torch.Tensor) -> None:
        """Write zeros between the parameters in a buffer with one shard."""
        gaps = [buffer[start:stop] for start, stop in self._gaps]
        if gaps:
            torch._foreach_zero_(gaps)

    @cached_property
    def _gaps(self) -> Sequence[tuple[int, int]]:
        ends = [slot.offset + slot.elements for slot in self.slots]
        starts = [*(slot.offset for slot in self.slots[1:]), self.elements]
        return [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]

    @cached_property
    def _wholes(self) -> Sequence[Window]:
        return [slot.window(slot.offset) for slot in self.slots]

    def _windows(self, shard: int) -> Sequence[Window]:
        if shard not in self._by_shard:
            self._by_shard[shard] = [
                slot.window(slot.offset + slot.interval(shard)[0], slot.rows(shard)) for slot in self.slots
            ]
        return self._by_shard[shard]

    @cached_property
    def _by_shard(self) -> dict[int, Sequence[Window]]:
        return {}


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dims of a dense tensor in memory order, from outermost to innermost (see channels_last).

    If the first dim is not the outermost, or the tensor has gaps, return the dims in numerical order.
    """
    plain = tuple(range(tensor.dim()))
    if tensor.is_contiguous() or 0 in tensor.stride():
        return plain
    order = tuple(sorted(plain, key=lambda dim: tensor.stride(dim), reverse=True))
    return order if order[0] == 0 and tensor.permute(order).is_contiguous() else plain


def part_of_rows(rows: int, shards: int, shard: int) -> range:
    """Return the rows of a shard, out of this number of rows."""
    part = -(-rows // shards)
    return range(min(shard * part, rows), min((shard + 1) * part, rows))


def fill_buckets(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Group items, in order, into buckets that close once they hold `capacity` or more.

    Args:
        sizes: Bytes of each item.
        capacity: Bytes at which a bucket is closed; a larger item has a bucket to itself or ends one.

    Returns:
        The indices of the items of each bucket.
    """
    buckets: list[list[int]] = [[]]
    held = 0
    for index, size in enumerate(sizes):
        if buckets[-1] and held + size > capacity:
            buckets.append([])
            held = 0
        buckets[-1].append(index)
        held += size
    return [bucket for bucket in buckets if bucket]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
