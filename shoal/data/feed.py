"""Makes the micro-batches of one rank, batch after batch, ahead of time where that changes nothing.

Where micro-batches are made:

- in a thread, two or more ahead, if the samples say that they draw nothing at random;
- in `workers` processes, ahead too, if workers are asked for;
- else in the thread that trains, when they are asked for, as `torch.utils.data.DataLoader` does by default.

All three give the same, since what a sample draws follows from (seed, epoch, index): see `generators.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar, final

import torch
from torch.utils.data import DataLoader, Dataset

from shoal.data.loader import Loader
from shoal.data.prefetch import Prefetcher
from shoal.data.samples import is_deterministic
from shoal.plan import Shares
from shoal.signals import obey_parent_alone, withheld_from_children

Item_co = TypeVar("Item_co", covariant=True)
Item = TypeVar("Item")


class Feed(Protocol[Item_co]):
    """Micro-batches without end."""

    def __iter__(self) -> Iterator[Item_co]: ...

    def __next__(self) -> Item_co:
        """Return the next micro-batch."""
        ...

    def close(self) -> None:
        """End the thread or the processes that make micro-batches. A second call does nothing."""
        ...


def open_feed(
    loader: Loader[Item],
    position: int,
    rank: int,
    ranks: int,
    microbatch: int,
    *,
    shares: Shares | None = None,
    ahead: int = 2,
    workers: int = 0,
) -> Feed[Item]:
    """Return the micro-batches of `Loader.stream`, made in a thread or in processes where that is allowed.

    Args:
        loader: The loader that distributes the samples.
        position: The global position at which the first batch starts.
        rank: This rank's place along the data-parallel axis.
        ranks: The whole data-parallel degree.
        microbatch: Samples that one forward sees on one rank.
        shares: The micro-batches of each rank; None if all take equally many.
        ahead: Number of micro-batches that may wait to be taken.
        workers: Number of processes that make them; 0 for none. `DataLoader` starts these processes.

    Raises:
        PlanError: The batch does not divide into these micro-batches.
        ValueError: `rank` is not in `range(ranks)`, or `ahead` is not positive.
    """
    if workers > 0:
        return _Workers(loader, (position, rank, ranks, microbatch, shares), ahead, workers)
    stream = loader.stream(position, rank, ranks, microbatch, shares)
    return Prefetcher(stream, depth=ahead) if is_deterministic(loader.samples) else _Direct(stream)


@final
class _Direct(Generic[Item]):
    """Makes each micro-batch when it is taken."""

    def __init__(self, stream: Iterator[Item]) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        return next(self._stream)

    def close(self) -> None:
        """Do nothing: no micro-batch is made ahead."""


@final
class _Workers(Generic[Item]):
    """Makes whole micro-batches in processes, which torch's DataLoader starts, feeds and ends."""

    def __init__(
        self, loader: Loader[Item], place: tuple[int, int, int, int, Shares | None], ahead: int, workers: int
    ) -> None:
        _, rank, ranks, microbatch, shares = place
        loader.number(rank, ranks, microbatch, shares)  # raises
        batches = DataLoader(
            _MicroBatches(loader, microbatch),
            batch_size=None,
            sampler=_starts(loader, *place),  # type: ignore[arg-type]
            num_workers=workers,
            collate_fn=_as_it_is,
            prefetch_factor=max(2, -(-ahead // workers)),
            generator=torch.Generator(),  # otherwise DataLoader would draw from the generator of training
            worker_init_fn=_obey_parent_alone,
        )
        with withheld_from_children():  # the last step before a stop needs data
            self._iterator: Iterator[Any] | None = iter(batches)

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        if self._iterator is None:
            raise StopIteration
        item: Item = next(self._iterator)
        return item

    def close(self) -> None:
        """End the processes."""
        self._iterator = None


class _MicroBatches(Dataset[Any]):
    """Micro-batches by the position at which they start."""

    def __init__(self, loader: Loader[Any], microbatch: int) -> None:
        self._loader = loader
        self._microbatch = microbatch

    def __getitem__(self, start: int) -> Any:
        return self._loader.fetch(start, self._microbatch)


def _starts(
    loader: Loader[Any], position: int, rank: int, ranks: int, microbatch: int, shares: Shares | None
) -> Iterator[int]:
    while True:
        for number in range(loader.number(rank, ranks, microbatch, shares)):
            yield loader.start(position, number, rank, ranks, microbatch, shares)
        position += loader.batch_size


def _obey_parent_alone(_: int) -> None:
    obey_parent_alone()


def _as_it_is(item: Item) -> Item:
    return item
