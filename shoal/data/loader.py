"""Distributes samples to ranks in one global order, whose whole state is the global position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from shoal.data.generators import key_of
from shoal.data.permutation import order
from shoal.data.samples import OrderedSamples, Samples, fetch
from shoal.errors import ConfigError, DataError, PlanError
from shoal.plan import Shares

Batch = TypeVar("Batch")


class Loader(Generic[Batch]):
    """Gives each data-parallel rank its part of each batch.

    The position is the number of samples consumed so far by all ranks together. Position `p` holds the
    sample that stands at `p % n` in the order of epoch `p // n`, where `n` is the number of samples. A
    batch is the next `batch_size` positions, whatever the number of ranks and the micro-batch are. The
    loader keeps no position: whoever trains keeps it, and saves it in the checkpoint.

    Args:
        samples: The samples to distribute.
        seed: Seed of the order.
        batch_size: Samples that one optimizer step sees, over all ranks.

    Raises:
        ConfigError: `batch_size` is not positive.
        DataError: There are no samples.
    """

    def __init__(self, samples: Samples[Batch], *, seed: int, batch_size: int) -> None:
        if batch_size < 1:
            raise ConfigError(
                f"the batch size is {batch_size}",
                possible="a positive number of samples",
                change="set the batch size to 1 or more",
            )
        if len(samples) < 1:
            raise DataError(
                "the data has no samples",
                possible="at least one sample",
                change="give data that is not empty",
            )
        self.samples = samples
        self.seed = seed
        self.batch_size = batch_size

    def indices(self, position: int, count: int) -> NDArray[np.int64]:
        """Return the samples' indices at the global positions `[position, position + count)`, `[count]`.

        Raises:
            ValueError: `position` or `count` is negative.
        """
        if position < 0 or count < 0:
            raise ValueError(f"position {position} and count {count} must not be negative")
        if isinstance(self.samples, OrderedSamples):
            return self.samples.ordered(self.seed, position, count)
        size = len(self.samples)
        parts = [np.empty(0, dtype=np.int64)]
        end = position + count
        while position < end:
            epoch, start = divmod(position, size)
            stop = min(size, start + end - position)
            parts.append(order(self.seed, epoch, size, np.arange(start, stop, dtype=np.int64)))
            position += stop - start
        return np.concatenate(parts)

    def state(self, position: int) -> dict[str, Any]:
        """Return the state of the data at a position, from which another loader goes on; JSON."""
        samples = self.samples
        if not isinstance(samples, OrderedSamples):
            return {"position": position}
        return {"position": position, "mark": samples.mark(self.seed, position)}

    def take(self, state: Mapping[str, Any]) -> None:
        """Take note of a state, so that nothing before its position has to be read."""
        if isinstance(self.samples, OrderedSamples) and "mark" in state:
            self.samples.take(self.seed, state["mark"])

    def keys(self, position: int, count: int) -> list[int]:
        """Return the seed of the generators for each sample there: a function of seed, epoch and index."""
        size = len(self.samples)
        places = range(position, position + count)
        return [
            key_of(self.seed, place // size, int(index))
            for place, index in zip(places, self.indices(position, count), strict=True)
        ]

    def fetch(self, position: int, count: int) -> Batch:
        """Return the samples at the global positions `[position, position + count)`, joined; see `fetch`.

        Raises:
            DataError: The samples may draw random numbers, and this thread runs beside the one that trains.
        """
        indices = self.indices(position, count)
        return fetch(self.samples, indices, lambda: self.keys(position, count))

    def accumulation(self, ranks: int, microbatch: int) -> int:
        """Return the number of micro-batches that each rank takes for one batch.

        Args:
            ranks: The whole data-parallel degree.
            microbatch: Samples that one forward sees on one rank.

        Raises:
            PlanError: The batch size is not a multiple of `ranks * microbatch`.
        """
        if ranks < 1 or microbatch < 1:
            raise PlanError(
                f"{ranks} data-parallel ranks with a micro-batch of {microbatch} cannot share a batch",
                possible="at least one rank and at least one sample in a micro-batch",
                change="set both to 1 or more",
            )
        unit = ranks * microbatch
        whole, rest = divmod(self.batch_size, unit)
        if rest:
            legal = [str(size) for size in (whole * unit, (whole + 1) * unit) if size]
            raise PlanError(
                f"the batch size {self.batch_size} cannot be shared evenly by {ranks} data-parallel ranks "
                f"with micro-batches of {microbatch}",
                possible=f"a multiple of {ranks} * {microbatch} = {unit}",
                change=f"set the batch size to {' or '.join(legal)}, or change the micro-batch",
            )
        return whole

    def number(self, rank: int, ranks: int, microbatch: int, shares: Shares | None = None) -> int:
        """Return the number of micro-batches that one rank takes for one batch.

        Args:
            rank: This rank's place along the data-parallel axis.
            ranks: The whole data-parallel degree.
            microbatch: Samples that one forward sees on one rank.
            shares: The micro-batches of each rank; None if all take equally many.

        Raises:
            PlanError: The batch does not divide into these micro-batches.
        """
        if shares is None:
            return self.accumulation(ranks, microbatch)
        shares.require_batch(self.batch_size, microbatch)
        return shares.of_rank(rank)

    def microbatches(
        self, position: int, rank: int, ranks: int, microbatch: int, shares: Shares | None = None
    ) -> Iterator[Batch]:
        """Yield the micro-batches that one rank takes from the batch that starts at `position`, in order.

        Micro-batch `j` holds the positions `position + (j * ranks + rank) * microbatch + [0, microbatch)`.
        With shares, round `j` counts only the ranks that take a micro-batch `j`: see `shoal.plan.shares`.

        Args:
            position: The global position at which the batch starts.
            rank: This rank's place along the data-parallel axis.
            ranks: The whole data-parallel degree.
            microbatch: Samples that one forward sees on one rank.
            shares: The micro-batches of each rank; None if all take equally many.

        Raises:
            PlanError: The batch does not divide into these micro-batches.
            ValueError: `rank` is not in `range(ranks)`.
        """
        number = self.number(rank, ranks, microbatch, shares)
        starts = [self.start(position, j, rank, ranks, microbatch, shares) for j in range(number)]
        return (self.fetch(start, microbatch) for start in starts)

    @staticmethod
    def start(
        position: int, number: int, rank: int, ranks: int, microbatch: int, shares: Shares | None = None
    ) -> int:
        """Return the global position at which micro-batch `number` of a rank starts; see `microbatches`.

        Raises:
            ValueError: `rank` is not in `range(ranks)`.
        """
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} is not in range({ranks})")
        before = number * ranks + rank if shares is None else shares.before(rank, number)
        return position + before * microbatch

    def stream(
        self, position: int, rank: int, ranks: int, microbatch: int, shares: Shares | None = None
    ) -> Iterator[Batch]:
        """Yield the micro-batches of one rank, batch after batch from `position` on, without end.

        A Prefetcher reads this, so that it continues across batches. Arguments and errors are those of
        `microbatches`.
        """
        while True:
            yield from self.microbatches(position, rank, ranks, microbatch, shares)
            position += self.batch_size
