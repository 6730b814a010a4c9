"""Packed samples that keep their documents apart.

A sample is a window of the token stream, and holds the ends and beginnings of documents. Each position is
counted from the beginning of its document, or of the sample if the document began before. The token that
ends a document has no target: it would be the first token of the next document.

Samples of several sources in the shares that weights give.

An epoch is just long enough to hold each sample once: the source with the most samples for its weight gives
each of them once, and the others repeat theirs, all of them equally often. A fixed permutation spreads the
sources over the epoch, so that its beginning has about the same shares; the Loader permutes it anew in each
epoch. So a position alone says which sample stands there, and a run goes on from any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.permutation import order
from shoal.data.samples import TokenSamples

_NO_TARGET = -100


class Packed(NamedTuple):
    """The input of a model: tokens, and their positions.

    Attributes:
        tokens: `[batch, seq]`, int64.
        position_ids: Position of each token in its document, `[batch, seq]`, int64.
    """

    tokens: Tensor
    position_ids: Tensor


@final
class PackedSamples:
    """Windows of a token stream whose documents are kept apart.

    Args:
        samples: The windows.
        end: The id that ends each document.
    """

    deterministic = True
    all_targets_count = False
    is_packed = True

    def __init__(self, samples: TokenSamples, end: int) -> None:
        self._samples = samples
        self._end = end

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Packed, Tensor]:
        """Return inputs and targets of one sample, int64 `[seq]` each."""
        inputs, targets = self.batch(np.array([index], dtype=np.int64))
        return Packed(inputs.tokens[0], inputs.position_ids[0]), targets[0]

    def batch(self, indices: NDArray[np.int64]) -> tuple[Packed, Tensor]:
        """Return inputs and targets of the samples at `indices`; a target of -100 does not count.

        Raises:
            IndexError: An index is not in `range(len(self))`.
        """
        return kept_apart(*self._samples.batch(indices), self._end)


def kept_apart(tokens: Tensor, targets: Tensor, end: int) -> tuple[Packed, Tensor]:
    """Return inputs with the positions in their documents, and targets, of which `end` tokens have none.

    Args:
        tokens: Windows of a token stream, `[batch, seq]`.
        targets: The tokens that follow, `[batch, seq]`.
        end: The id that ends each document.
    """
    ends = tokens == end
    every = torch.arange(tokens.shape[1])
    begins = torch.zeros_like(tokens)
    begins[:, 1:] = torch.where(ends[:, :-1], every[1:], 0)
    starts = begins.cummax(1).values
    return Packed(tokens, every - starts), targets.masked_fill(ends, _NO_TARGET)


def joined(
    sources: NDArray[np.int64], batch: Callable[[int, NDArray[np.int64]], tuple[Any, Tensor]]
) -> tuple[Any, Tensor]:
    """Return inputs and targets of a batch whose rows come from several sources.

    Args:
        sources: The source of each row, `[batch]`.
        batch: Function that returns the inputs and targets of some rows, all of one source, from the source
            and the places of these rows in the batch.
    """
    places = [(int(source), np.flatnonzero(sources == source)) for source in np.unique(sources)]
    inputs, targets = zip(*(batch(source, rows) for source, rows in places), strict=True)
    back = torch.from_numpy(np.concatenate([rows for _, rows in places]).argsort())
    return _rows(inputs, back), torch.cat(targets)[back]


def _rows(parts: Sequence[Any], back: Tensor) -> Any:
    """Return the rows of all inputs as one, in their places."""
    first = parts[0]
    if isinstance(first, Packed):
        return Packed(*(_rows(each, back) for each in zip(*parts, strict=True)))
    if isinstance(first, dict):
        return {name: _rows([part[name] for part in parts], back) for name in first}
    return torch.cat(list(parts))[back]


@final
class MixedSamples:
    """Samples of several sources in the shares that weights give.

    Args:
        parts: The samples of each source.
        weights: The weight of each, positive.
    """

    deterministic = True

    def __init__(self, parts: Sequence[TokenSamples | PackedSamples], weights: Sequence[float]) -> None:
        self._parts = parts
        self.all_targets_count = all(part.all_targets_count for part in parts)
        self.is_packed = any(isinstance(part, PackedSamples) for part in parts)
        once = max(len(part) / weight for part, weight in zip(parts, weights, strict=True))
        self.counts = tuple(
            max(len(part), round(once * weight)) for part, weight in zip(parts, weights, strict=True)
        )
        self._ends = np.cumsum(self.counts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def batch(self, indices: NDArray[np.int64]) -> tuple[Tensor | Packed, Tensor]:
        """Return inputs and targets of the samples at `indices`, joined.

        Raises:
            IndexError: An index is not in `range(len(self))`.
        """
        if indices.size and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"sample indices must lie in range({len(self)})")
        spread = order(0, 0, len(self), indices)
        sources = np.searchsorted(self._ends, spread, side="right")
        begins = self._ends - self.counts
        return joined(
            sources,
            lambda source, rows: self._parts[source].batch(
                (spread[rows] - begins[source]) % len(self._parts[source])
            ),
        )
