"""A Plan's `shares`: the micro-batches that each data-parallel rank makes in a step, where they differ.

    shares=3x24-2x8     three micro-batches on each of the first 24 ranks along dp, two on each of the next 8
    shares=3-3-3-2      three ranks with three and one with two; written 3x3-2

A rank on a slow device that gets fewer micro-batches does not keep the others waiting. The gradient is the
mean over all micro-batches of the step, whoever made them. So a batch need not divide over the ranks either:
a batch of 16 is 6 + 5 + 5 on three.

With `shard=zero2` or `zero3`, and with a pipeline, ranks need each other in each micro-batch. There a rank
with fewer micro-batches makes its last one again, with a loss of zero, until it has made as many as the rank
with most: it is padded.

The micro-batches of a batch are handed out in rounds: in round j each rank that makes more than j takes the
next one, in the order of ranks. With equal numbers these are the micro-batches that a rank has without
`shares`. Ranks that differ along tp or cp only have the same samples, and so equal numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Self

from shoal.errors import PlanError

EQUAL = "equal"
"""The value of `shares` with which all ranks make equally many micro-batches, whatever the batch is."""

_RUN = re.compile(r"([1-9]\d*)(?:x([1-9]\d*))?")


@dataclass(frozen=True, slots=True)
class Shares:
    """Numbers of micro-batches by index along dp.

    Attributes:
        runs: Pairs of a number of micro-batches and of ranks in a row that make so many each.
    """

    runs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, numbers: Iterable[int]) -> Self:
        """Return the Shares with these numbers, one for each rank along dp."""
        return cls(tuple((number, len(list(alike))) for number, alike in groupby(numbers)))

    @classmethod
    def even(cls, total: int, ranks: int) -> Self:
        """Return the Shares of so many micro-batches over ranks, of which the first may have one more."""
        return cls.of(total // ranks + (rank < total % ranks) for rank in range(ranks))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text form, such as `3x24-2x8`.

        Raises:
            PlanError: It cannot be read.
        """
        return cls(_runs_of(text))

    def __str__(self) -> str:
        return "-".join(f"{number}x{ranks}" if ranks > 1 else str(number) for number, ranks in self.runs)

    @property
    def total(self) -> int:
        """Micro-batches of a step, of all ranks together."""
        return sum(number * ranks for number, ranks in self.runs)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return sum(ranks for _, ranks in self.runs)

    @property
    def most(self) -> int:
        """The most micro-batches that a rank makes."""
        return max(number for number, _ in self.runs)

    def of_rank(self, rank: int) -> int:
        """Return the micro-batches of the rank with this index along dp."""
        for number, ranks in self.runs:
            if rank < ranks:
                return number
            rank -= ranks
        raise ValueError(f"rank {rank} is beyond the last one")

    def mean_of(self, number: int, made: int) -> float:
        """Return how many micro-batches a mean rank makes while one makes `number` of `made`.

        A rank that divides the sum of its micro-batches' losses by this has its part of the mean over all.
        Where ranks are padded, all of them make `most`, some of these without a loss.
        """
        return number * self.total / self.ranks / made

    def before(self, rank: int, number: int) -> int:
        """Return how many of the batch's micro-batches come before a rank's micro-batch `number`."""
        found = first = 0
        for made, ranks in self.runs:
            found += min(made, number) * ranks  # of earlier rounds
            if made > number:
                found += max(0, min(ranks, rank - first))  # of this round
            first += ranks
        return found

    def require(self, *, dp: int, ep: int, exchange: str, compress: str) -> None:
        """Check that there is a number for each rank, and that ranks may make different numbers.

        Raises:
            PlanError: The numbers are not `dp`, or something needs equally many micro-batches.
        """
        if self.ranks != dp:
            raise PlanError(
                f"shares={self} has numbers for {self.ranks} ranks, and dp={dp}",
                possible=f"{dp} numbers: one for each rank along dp, such as 3x{dp}",
                change=f"correct the numbers, or write dp={self.ranks}",
            )
        if ep > 1:
            raise PlanError(
                f"shares={self} was given with ep={ep}, and ranks exchange tokens in each micro-batch",
                possible="shares with ep=1",
                change="leave out ep, or leave out shares",
            )
        if exchange not in ("bucketed", "naive") or compress != "none":
            raise PlanError(
                f"shares={self} was given with exchange={exchange}, compress={compress}, which are made for "
                "workers with equally many micro-batches",
                possible="shares with exchange=bucketed and compress=none",
                change="leave out exchange and compress, or leave out shares",
            )

    def require_batch(self, batch: int, microbatch: int | None) -> None:
        """Check that a batch of so many samples has as many micro-batches.

        Raises:
            PlanError: It has not.
        """
        given = "" if microbatch is None else f" with microbatch={microbatch}"
        size = max(1, batch // self.total) if microbatch is None else microbatch
        if self.total * size == batch:
            return
        raise PlanError(
            f"a batch of {batch}{given} does not divide into the {self.total} micro-batches of shares={self}",
            possible=f"a batch of {self.total} x microbatch",
            change=f"choose a batch of {self.total * size}, or shares whose sum is the batch / microbatch",
        )


@lru_cache(maxsize=1 << 10)
def _runs_of(text: str) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for each in str(text).split("-"):
        match = _RUN.fullmatch(each)
        if match is None:
            raise PlanError(
                f"shares={text} cannot be read",
                possible=f"{EQUAL}, or for each rank along dp its number of micro-batches, joined by -; "
                "3x24 is three on each of 24 ranks",
                change="write, for example, shares=3x24-2x8",
            )
        number, ranks = int(match[1]), int(match[2] or 1)
        if found and found[-1][0] == number:
            ranks += found.pop()[1]
        found.append((number, ranks))
    return tuple(found)
