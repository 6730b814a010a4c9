"""The Group: a pattern of ranks that communicate, as nested runs at equal distances."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

Dim = tuple[int, int]
"""A number of equal patterns, and the distance from each to the next, in ranks."""


@dataclass(frozen=True, slots=True)
class Group:
    """A pattern of ranks that communicate: equal runs of neighbours at equal distances.

    If the ranks lie along axes between which other axes stand, such runs are repeated at larger distances.

    Attributes:
        size: Number of ranks.
        stride: Distance from each run to the next, in ranks.
        run: Number of neighbouring ranks in a run; it divides `size`, and is at most `stride`.
        outer: Repetitions of these runs, outermost first; empty if there is one distance alone.
    """

    size: int
    stride: int = 1
    run: int = 1
    outer: tuple[Dim, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "outer", tuple(tuple(each) for each in self.outer))  # lists, out of a file

    @classmethod
    def along(cls, dims: Iterable[Dim]) -> Self:
        """Return the pattern of nested dims, outermost first."""
        *outer, (number, stride) = merged(dims) or [(1, 1)]
        size = math.prod((number, *(each for each, _ in outer)))
        if stride > 1:
            return cls(size, stride, outer=tuple(outer))
        if not outer:
            return cls(size)
        *others, (_, distance) = outer
        return cls(size, distance, number, tuple(others))

    @classmethod
    def of(cls, ranks: Sequence[int]) -> Self:
        """Return the pattern of these global ranks, given in any order.

        If they are no pattern, return one of as many ranks, whose runs are as their first one.
        """
        ordered = sorted(ranks)
        offsets, dims, found = [rank - ordered[0] for rank in ordered], list[Dim](), 1
        while found < len(offsets):
            stride, number = offsets[found], 1
            inner = offsets[:found]
            while offsets[number * found : (number + 1) * found] == [
                number * stride + each for each in inner
            ]:
                number += 1
            if number == 1 or len(offsets) % (number * found):
                run = next(at for at, each in enumerate(offsets) if each != at)
                return cls(len(offsets), offsets[run], run)
            dims.insert(0, (number, stride))
            found *= number
        return cls.along(dims)

    @property
    def dims(self) -> tuple[Dim, ...]:
        """The nested dims of the pattern, outermost first."""
        runs = self.size // self.run // math.prod(number for number, _ in self.outer)
        return tuple(merged([*self.outer, (runs, self.stride), (self.run, 1)]))

    def ranks(self, first: int) -> tuple[int, ...]:
        """Return the global ranks of the group that begins at `first`, ascending."""
        ranges = [range(0, number * stride, stride) for number, stride in self.dims]
        return tuple(first + sum(offsets) for offsets in itertools.product(*ranges))

    def around(self, rank: int) -> tuple[int, ...]:
        """Return the global ranks of the group that this rank belongs to, ascending."""
        return self.ranks(rank - sum(rank // stride % number * stride for number, stride in self.dims))

    def tile(self, ranks: int) -> list[tuple[int, ...]]:
        """Return all groups of this pattern among `ranks` ranks: every rank is in exactly one."""
        dims = self.dims
        return [
            self.ranks(first)
            for first in range(ranks)
            if all(first // stride % number == 0 for number, stride in dims)
        ]

    def within(self, devices: int) -> int:
        """Return how many ranks the group that begins at rank 0 has among the first `devices` ranks."""
        found, left, inside = 0, devices, self.size
        for number, stride in self.dims:
            inside //= number
            whole = min(number, left // stride)
            found += whole * inside
            if whole == number:
                return found
            left -= whole * stride
        return found + (1 if left > 0 else 0)


def merged(dims: Iterable[Dim]) -> list[Dim]:
    """Return nested dims, outermost first, without those of one and with those joined that follow on."""
    found: list[Dim] = []
    for number, stride in dims:
        if number == 1:
            continue
        if found and found[-1][1] == number * stride:
            found[-1] = found[-1][0] * number, stride
        else:
            found.append((number, stride))
    return found


def split_dims(dims: Iterable[Dim], inner: int) -> tuple[list[Dim], list[Dim]] | None:
    """Return outer and inner dims, of which the inner ones have `inner` ranks: the innermost neighbours.

    Return None if so many neighbours are no nested pattern: if they end within an outer dim.
    """
    outer, taken, left = merged(dims), list[Dim](), inner
    while left > 1 and outer:
        number, stride = outer.pop()
        if left % number == 0:
            taken.insert(0, (number, stride))
            left //= number
        elif number % left == 0:
            taken.insert(0, (left, stride))
            outer.append((number // left, left * stride))
            left = 1
        else:
            return None
    return (outer, taken) if left == 1 else None
