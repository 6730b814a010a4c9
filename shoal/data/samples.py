"""Samples: what one row of a batch is made from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate

from shoal.errors import ConfigError, DataError

__all__ = ["MapSamples", "Samples", "TokenSamples"]

Batch_co = TypeVar("Batch_co", covariant=True)


class Samples(Protocol[Batch_co]):
    """A fixed number of samples, of which any may be asked for, in any order, any number of times."""

    def __len__(self) -> int:
        """How many samples an epoch has."""
        ...

    def batch(self, indices: NDArray[np.int64]) -> Batch_co:
        """The samples at `indices`, `[batch]`, joined into what the model takes."""
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

    def __init__(self, tokens: NDArray[np.integer], sequence: int) -> None:
        if sequence < 1:
            raise ConfigError(
                f"the sequence length is {sequence}",
                possible="a positive number of tokens",
                change="set the sequence length to 1 or more",
            )
        self._tokens = np.asarray(tokens)
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
        """Inputs and targets of one sample, int64 `[seq]` each."""
        inputs, targets = self.batch(np.array([index], dtype=np.int64))
        return inputs[0], targets[0]

    def batch(self, indices: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of the samples at `indices`, int64 `[batch, seq]` each.

        Raises:
            IndexError: An index is not in `range(len(self))`.
        """
        if indices.size and not 0 <= indices.min() <= indices.max() < self._count:
            raise IndexError(f"sample indices must lie in range({self._count})")
        windows = self._tokens[indices[:, None] * self.sequence + self._window]
        inputs, targets = windows[:, :-1].astype(np.int64), windows[:, 1:].astype(np.int64)
        return torch.from_numpy(inputs), torch.from_numpy(targets)


class MapDataset(Protocol):
    """What a map-style dataset has; `torch.utils.data.Dataset` with a length is one, and so is a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@final
class MapSamples:
    """Any map-style dataset as Samples.

    Args:
        dataset: Has `__len__` and `__getitem__`.
        collate: Joins a list of items into a batch; by default as `torch.utils.data.DataLoader` does.

    Raises:
        DataError: `dataset` is not map-style, or is empty.
    """

    def __init__(self, dataset: MapDataset, *, collate: Callable[[list[Any]], Any] = default_collate) -> None:
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

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(self, indices: NDArray[np.int64]) -> Any:
        """The items at `indices`, `[batch]`, collated."""
        return self._collate([self._dataset[int(index)] for index in indices])
