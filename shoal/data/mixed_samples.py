"""Samples of several sources in the shares that weights give.

An epoch is just long enough to hold each sample once: the source with the most samples for its weight gives
each of them once, and the others repeat theirs, all of them equally often. A fixed permutation spreads the
sources over the epoch, so that its beginning has about the same shares; the Loader permutes it anew in each
epoch. So a position alone says which sample stands there, and a run goes on from any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.joined import joined
from shoal.data.packed import Packed, PackedSamples
from shoal.data.permutation import order
from shoal.data.samples import TokenSamples


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
