"""How parameters lie in flat buckets, and which part of a bucket belongs to which shard: arithmetic only.

A bucket is one flat buffer that holds several parameters one after another. Each starts at a multiple of
`ALIGNMENT` elements, so that a view of it is as well aligned as a tensor of its own, and the whole is padded
so that it cuts into equal shards. A shard then holds an interval of some parameters: its pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

__all__ = ["ALIGNMENT", "BucketLayout", "Cut", "Interval", "Slot", "fill_buckets"]

ALIGNMENT = 16
"""Elements; 64 bytes in fp32, a cache line."""


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
        """The block's shape."""
        return (*self.shape[: self.dim], self.length, *self.shape[self.dim + 1 :])

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The block of a whole parameter, as a view."""
        return whole.narrow(self.dim, self.offset, self.length)


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one parameter lies in its bucket.

    Attributes:
        name: The parameter's name in the model.
        shape: Its shape.
        offset: Its first element in the bucket's buffer.
    """

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def elements(self) -> int:
        """Number of elements of the parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Interval:
    """The part [start, stop) of a flattened parameter, and where it lies in a shard's buffer."""

    slot: Slot
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """The slots of one bucket and how it is cut.

    Attributes:
        slots: One per parameter, in the order of the buffer.
        shards: Number of equal shards.
        elements: Length of the buffer; a multiple of `shards` x `ALIGNMENT`.
    """

    slots: tuple[Slot, ...]
    shards: int
    elements: int

    @classmethod
    def of(cls, parameters: Iterable[tuple[str, tuple[int, ...]]], shards: int) -> BucketLayout:
        """Lays parameters (name, shape) one after another, to be cut into `shards`."""
        slots, end = [], 0
        for name, shape in parameters:
            slots.append(Slot(name, shape, end))
            end = _round_up(end + slots[-1].elements, ALIGNMENT)
        return cls(tuple(slots), shards, _round_up(end, shards * ALIGNMENT))

    @property
    def shard_elements(self) -> int:
        """Number of elements of one shard."""
        return self.elements // self.shards

    def pieces(self, shard: int) -> list[Interval]:
        """What shard number `shard` holds of the parameters, in the order of the buffer.

        A shard of padding alone holds an empty piece of the first parameter: optimizers refuse a rank that
        owns nothing.
        """
        first = shard * self.shard_elements
        last = first + self.shard_elements
        pieces = []
        for slot in self.slots:
            start, stop = max(first, slot.offset), min(last, slot.offset + slot.elements)
            if start < stop:
                pieces.append(Interval(slot, start - slot.offset, stop - slot.offset, start - first))
        return pieces or [Interval(self.slots[0], 0, 0, 0)]


def fill_buckets(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Groups items, in order, into buckets that close once they hold `capacity` or more.

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
