"""Samples: the source of the rows of a batch.

Beside the interface of `Samples`, an object may have two attributes that are true. `deterministic`: its
`batch` draws nothing from a global random generator, so a thread may fetch ahead. `all_targets_count`: none
of its targets is -100, so all micro-batches have the same weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast, final, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset, default_collate

from shoal.data.permutation import generators_put_aside, key_of, refuse_here, seed_generators
from shoal.errors import ConfigError, DataError


@final
class JoinedIds:
    """Arrays of ids, one behind the other, of which only what is asked for is read.

    Args:
        parts: The arrays, `[length]` each.
    """

    def __init__(self, parts: Sequence[NDArray[np.integer]]) -> None:
        self._parts = [part for part in parts if len(part)]
        self._ends = np.cumsum([len(part) for part in self._parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, places: slice | NDArray[np.int64]) -> Any:
        """Return a part of the stream, mapped too, or the ids at some places, in an array of their shape."""
        begins = self._ends - [len(part) for part in self._parts]
        if isinstance(places, slice):
            first, last, step = places.indices(len(self))
            assert step == 1, "a stream has no steps"
            cut = [
                part[max(0, first - begin) : max(0, last - begin)]
                for part, begin in zip(self._parts, begins.tolist(), strict=True)
            ]
            return JoinedIds(cut)
        ids = np.empty(places.shape, dtype=np.int64)
        sources = np.searchsorted(self._ends, places, side="right")
        for source in np.unique(sources):
            here = sources == source
            ids[here] = self._parts[source][places[here] - begins[source]]
        return ids


Batch_co = TypeVar("Batch_co", covariant=True)


class Samples(Protocol[Batch_co]):
    """A fixed number of samples, which can be read in any order, any number of times."""

    def __len__(self) -> int:
        """Return the number of samples in an epoch."""
        ...

    def batch(self, indices: NDArray[np.int64]) -> Batch_co:
        """Return the samples at `indices`, `[batch]`, joined into the model's input."""
        ...


@runtime_checkable
class OrderedSamples(Samples[Batch_co], Protocol[Batch_co]):
    """Samples with an order of their own, whose number is known only after all were read once."""

    def ordered(self, seed: int, position: int, count: int) -> NDArray[np.int64]:
        """Return the indices of the samples at the global positions `[position, position + count)`."""
        ...

    def mark(self, seed: int, position: int) -> Sequence[Any]:
        """Return what `take` of another process needs to go on from a position at once; JSON."""
        ...

    def take(self, seed: int, mark: Sequence[Any]) -> None:
        """Take note of what `mark` gave."""
        ...


@final
class TokenSamples:
    """Windows of a token stream: sample `i` is `tokens[i * sequence : i * sequence + sequence + 1]`.

    Its inputs are the first `sequence` of these tokens, and its targets the last. Neighbouring samples
    share one token, so that every token but the first is a target once.

    Args:
        tokens: The stream, `[length]`, of an integer dtype.
        sequence: Tokens that the model sees at once.

    Raises:
        ConfigError: `sequence` is not positive.
        DataError: The stream is shorter than one sample.
    """

    deterministic = True
    all_targets_count = True

    def __init__(self, tokens: NDArray[np.integer] | JoinedIds, sequence: int) -> None:
        if sequence < 1:
            raise ConfigError(
                f"the sequence length is {sequence}",
                possible="a positive number of tokens",
                change="set the sequence length to 1 or more",
            )
        self._tokens = tokens if isinstance(tokens, JoinedIds) else np.asarray(tokens)
        self._count = max(0, len(tokens) - 1) // sequence
        self._window = np.arange(sequence + 1)
        self.sequence = sequence
        if self._count == 0:
            raise DataError(
                f"there are {len(tokens)} tokens, and one sample takes {sequence + 1}",
                possible=f"a sequence length of at most {len(tokens) - 1}"
                if len(tokens) > 1
                else "at least 2 tokens",
                change="give more data, or a shorter sequence length",
            )

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of one sample, int64 `[seq]` each."""
        inputs, targets = self.batch(np.array([index], dtype=np.int64))
        return inputs[0], targets[0]

    def batch(self, indices: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of the samples at `indices`, int64 `[batch, seq]` each.

        Raises:
            IndexError: An index is not in `range(len(self))`.
        """
        if indices.size and not 0 <= indices.min() <= indices.max() < self._count:
            raise IndexError(f"sample indices must lie in range({self._count})")
        windows = self._tokens[indices[:, None] * self.sequence + self._window]
        inputs, targets = windows[:, :-1].astype(np.int64), windows[:, 1:].astype(np.int64)
        return torch.from_numpy(inputs), torch.from_numpy(targets)


class MapDataset(Protocol):
    """A map-style dataset, such as a `torch.utils.data.Dataset` with a length, or a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@final
class MapSamples:
    """Any map-style dataset as Samples.

    Torch's, numpy's and Python's global generators are seeded for each item, and for each batch's `collate`.
    So random augmentations are equal in a resumed run, on any number of ranks. Items of a dataset that may
    draw are therefore read in the thread that trains, or in processes (see `open_feed`); items of a dataset
    that draws nothing are read in a separate thread.

    Args:
        dataset: The dataset, which has `__len__` and `__getitem__`.
        collate: Function that joins a list of items into a batch; by default that of
            `torch.utils.data.DataLoader`.
        deterministic: Whether neither `dataset` nor `collate` draws from a global generator. None: True for a
            list or a `TensorDataset` with the default `collate`, which draw nothing.

    Raises:
        DataError: `dataset` is not map-style, or is empty.
    """

    def __init__(
        self,
        dataset: MapDataset,
        *,
        collate: Callable[[list[Any]], Any] = default_collate,
        deterministic: bool | None = None,
    ) -> None:
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise DataError(
                f"a {type(dataset).__name__} cannot be read in any order, so it cannot be resumed",
                possible="a map-style dataset, with __len__ and __getitem__",
                change="give a map-style dataset, or read this one into a list first",
            )
        if len(dataset) == 0:
            raise DataError(
                f"the {type(dataset).__name__} that was given as data is empty",
                possible="at least one sample",
                change="give data that is not empty",
            )
        self._dataset = dataset
        self._collate = collate
        draws_nothing = type(dataset) in (list, tuple, TensorDataset) and collate is default_collate
        self.deterministic = draws_nothing if deterministic is None else deterministic

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(self, indices: NDArray[np.int64], keys: Sequence[int] | None = None) -> Any:
        """Return the items at `indices`, `[batch]`, collated.

        Args:
            indices: Indices of the items.
            keys: Seed of the global generators for each item; None: they are not seeded.
        """
        if keys is None:
            return self._collate([self._dataset[int(index)] for index in indices])
        items = []
        for index, key in zip(indices, keys, strict=True):
            seed_generators(key)
            items.append(self._dataset[int(index)])
        seed_generators(key_of(*keys))
        return self._collate(items)


def as_samples(data: Any) -> Samples[Any]:
    """Return data as Samples: Samples as they are, any map-style dataset as `MapSamples`.

    Raises:
        DataError: The data is neither.
    """
    # A dataset of the package `datasets` has a method `batch` with another meaning.
    is_hugging_face = type(data).__module__.partition(".")[0] == "datasets"
    if hasattr(data, "batch") and hasattr(data, "__len__") and not is_hugging_face:
        return cast(Samples[Any], data)
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return MapSamples(data)
    raise DataError(
        f"a {type(data).__name__} was given as data, whose samples cannot be read by index",
        possible="a map-style dataset such as a TensorDataset or a list, a shoal.data.MapSamples with its "
        "own collate, or an object with __len__ and batch(indices)",
        change="give one of these; for a loader or a stream, the dataset behind it or a list of its items",
    )


def all_targets_count(samples: Samples[Any]) -> bool:
    """Return whether samples say that none of their targets is -100."""
    return bool(getattr(samples, "all_targets_count", False))


def are_packed(samples: Samples[Any]) -> bool:
    """Return whether samples say that they hold documents that are kept apart."""
    return bool(getattr(samples, "is_packed", False))


def is_deterministic(samples: Samples[Any]) -> bool:
    """Return whether samples say that they draw nothing from a global random generator."""
    return bool(getattr(samples, "deterministic", False))


def fetch(
    samples: Samples[Batch_co], indices: NDArray[np.int64], keys: Callable[[], Sequence[int]]
) -> Batch_co:
    """Return the samples at `indices`; if they may draw, their keys seed the generators first.

    Args:
        samples: The samples to read from.
        indices: Indices of the samples, `[batch]`.
        keys: Function that returns a key for each sample, called only if keys are needed. For samples that
            are not `MapSamples`, all keys together seed the whole batch.

    Raises:
        DataError: The samples may draw, and this thread runs beside the one that trains.
    """
    if is_deterministic(samples):
        return samples.batch(indices)
    refuse_here(type(samples).__name__)
    with generators_put_aside():
        if isinstance(samples, MapSamples):
            return cast(Batch_co, samples.batch(indices, keys()))
        seed_generators(key_of(*keys()))
        return samples.batch(indices)
