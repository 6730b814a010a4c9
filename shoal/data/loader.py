"""Distributes samples to ranks in one global order, whose whole state is the global position.

Makes the micro-batches of one rank, batch after batch, ahead of time where that changes nothing.

Where micro-batches are made:

- in a thread, two or more ahead, if the samples say that they draw nothing at random;
- in `workers` processes, ahead too, if workers are asked for;
- else in the thread that trains, when they are asked for, as `torch.utils.data.DataLoader` does by default.

All three give the same, since what a sample draws follows from (seed, epoch, index).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from shoal.collectives.thread_device import on_callers_device, take_device
from shoal.data.permutation import key_of, order, shared_with_training
from shoal.data.samples import OrderedSamples, Samples, fetch, is_deterministic
from shoal.errors import ConfigError, DataError, PlanError
from shoal.signals import obey_parent_alone, withheld_from_children
from shoal.spec.plan import Shares

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
        With shares, round `j` counts only the ranks that take a micro-batch `j`: see
        `shoal.spec.plan.uneven_micro_batches`.

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


Item = TypeVar("Item")


class Prefetcher(Generic[Item]):
    """Iterates over `source`, up to `depth` items ahead of the consumer.

    It changes when items are made, not which items: `close` drops items that were not taken, and nothing is
    lost, because the consumer holds the position. An exception in `source` is raised in the
    consumer, after the items that were made before it. Use it as a context manager, or call `close`.

    Args:
        source: The items; only the thread uses it.
        depth: Number of items that may wait to be taken.

    Raises:
        ValueError: `depth` is not positive.
    """

    def __init__(self, source: Iterable[Item], *, depth: int = 2) -> None:
        if depth < 1:
            raise ValueError(f"depth is {depth}; it must be at least 1")
        self._depth = depth
        self._ready: deque[Item] = deque()
        self._error: BaseException | None = None
        self._finished = False  # the source has ended or failed, or close() was called
        self._changed = threading.Condition()
        fill = on_callers_device(self._fill)  # a user's source may compute on the GPU
        self._thread = threading.Thread(target=fill, args=(source,), name="shoal-prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._finished)
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            if self._error is not None:
                raise self._error
            raise StopIteration

    def close(self) -> None:
        """End the iteration, and wait until the thread has ended. A second call does nothing."""
        with self._changed:
            self._finished = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Prefetcher[Item]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _fill(self, source: Iterable[Item]) -> None:
        """Make an item whenever fewer than `depth` wait; this is the thread's function."""
        try:
            items = iter(source)
            while self._has_room():
                take_device()
                with shared_with_training():
                    item = next(items)
                with self._changed:
                    if not self._finished:
                        self._ready.append(item)
                    self._changed.notify_all()
        except StopIteration:
            pass
        except BaseException as error:
            self._error = error
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def _has_room(self) -> bool:
        """Wait until an item may be made; return False once the iteration is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._finished or len(self._ready) < self._depth)
            return not self._finished


Item_co = TypeVar("Item_co", covariant=True)


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
