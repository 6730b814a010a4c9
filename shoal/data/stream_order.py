"""The order of the samples of a stream: its sources take turns, and each has an order of windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from shoal.data.turns import Turns
from shoal.data.window_order import Mark, WindowOrder

_STEP = 0x9E3779B97F4A7C15  # between the seeds of sources

Sizes = Callable[[NDArray[np.int64]], NDArray[np.int64]]


@final
class StreamOrder:
    """The chunk and the row of the sample at each global position.

    Args:
        seed: Seed of the order.
        ends: The chunk behind the last of each source: each has at least one chunk, and one sample.
        weights: The weight of each source.
        width: Number of chunks in a window.
        sizes: Function that returns the number of samples of some chunks.
    """

    def __init__(
        self, seed: int, ends: Sequence[int], weights: Sequence[float], width: int, sizes: Sizes
    ) -> None:
        self._begins = [0, *ends[:-1]]
        self._turns = Turns(seed, weights)
        self._orders = [
            WindowOrder(seed + number * _STEP, end - begin, width, _moved(sizes, begin))
            for number, (begin, end) in enumerate(zip(self._begins, ends, strict=True))
        ]

    def places(self, position: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the chunk, and the row in it, at each position `[position, position + count)`."""
        sources, before = self._turns.sources(position, count), self._turns.before(position)
        chunks, rows = np.empty((2, count), dtype=np.int64)
        for source in np.unique(sources):
            here = np.flatnonzero(sources == source)
            found, rows[here] = self._orders[source].places(int(before[source]), len(here))
            chunks[here] = found + self._begins[source]
        return chunks, rows

    def window_at(self, source: int, position: int) -> int:
        """Return the number of the window that a source has reached at a global position."""
        return self._orders[source].window_at(int(self._turns.before(position)[source]))

    def chunks(self, source: int, window: int) -> NDArray[np.int64]:
        """Return the chunks of a window of a source."""
        return self._orders[source].chunks(window) + self._begins[source]

    def mark(self, position: int) -> list[Mark]:
        """Return, for each source, the last window that is known to begin at a position or before it."""
        before = self._turns.before(position).tolist()
        return [order.mark(each) for order, each in zip(self._orders, before, strict=True)]

    def take(self, marks: Sequence[Sequence[int]]) -> None:
        """Take note of where windows begin, as `mark` of the same order told."""
        for order, (position, window) in zip(self._orders, marks, strict=True):
            order.take(Mark(position, window))


def _moved(sizes: Sizes, begin: int) -> Sizes:
    return lambda chunks: sizes(chunks + begin)
