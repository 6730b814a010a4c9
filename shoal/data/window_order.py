"""The order of streamed samples: chunks in a shuffled order, and samples shuffled within windows of chunks.

In each epoch the chunks are permuted. Each `width` chunks that follow each other are a window, and the
samples of a window are permuted. So each sample comes once an epoch, and the order depends on the seed and
the number of samples of each chunk only. How many samples a chunk has is asked when its window is reached.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from shoal.data.permutation import order


class Mark(NamedTuple):
    """Where a window begins.

    Attributes:
        position: Global position of its first sample.
        window: Its number, counted over all epochs.
    """

    position: int
    window: int


@final
class WindowOrder:
    """The chunk and the row of the sample at each global position.

    Args:
        seed: Seed of the order.
        chunks: Number of chunks.
        width: Number of chunks in a window.
        sizes: Function that returns the number of samples of some chunks; in all chunks together there is at
            least one.
    """

    def __init__(
        self, seed: int, chunks: int, width: int, sizes: Callable[[NDArray[np.int64]], NDArray[np.int64]]
    ) -> None:
        self._seed = seed
        self._chunks = chunks
        self._width = width
        self._per_epoch = -(-chunks // width)
        self._sizes = sizes
        self._marks = [Mark(0, 0)]
        self._last: tuple[int, NDArray[np.int64], NDArray[np.int64]] | None = None

    def chunks(self, window: int) -> NDArray[np.int64]:
        """Return the chunks of a window, `[width]` or fewer."""
        epoch, place = divmod(window, self._per_epoch)
        begin = place * self._width
        return order(
            self._seed, epoch, self._chunks, np.arange(begin, min(begin + self._width, self._chunks))
        )

    def places(self, position: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the chunk, and the row in it, at each position `[position, position + count)`."""
        parts = [(np.empty(0, dtype=np.int64),) * 2]
        end = position + count
        while position < end:
            mark = self._mark_at(position)
            chunks, ends = self._window(mark.window)
            size = int(ends[-1])
            first = position - mark.position
            stop = min(size, first + end - position)
            # The complement of the seed: the seed itself permutes the chunks.
            rows = order(~self._seed, mark.window, size, np.arange(first, stop, dtype=np.int64))
            sources = np.searchsorted(ends, rows, side="right")
            begins = np.concatenate(([0], ends[:-1]))
            parts.append((chunks[sources], rows - begins[sources]))
            position += stop - first
        chunks, rows = (np.concatenate(each) for each in zip(*parts, strict=True))
        return chunks, rows

    def window_at(self, position: int) -> int:
        """Return the number of the window that holds a position."""
        return self._mark_at(position).window

    def mark(self, position: int) -> Mark:
        """Return the last window that is known to begin at a position or before it."""
        return self._marks[bisect.bisect_right(self._marks, (position, np.inf)) - 1]

    def take(self, mark: Mark) -> None:
        """Take note of where a window begins, as `mark` of the same order told."""
        place = bisect.bisect_left(self._marks, mark)
        if self._marks[place : place + 1] != [mark]:
            self._marks.insert(place, mark)

    def _mark_at(self, position: int) -> Mark:
        mark = self.mark(position)
        while True:
            following = Mark(mark.position + int(self._window(mark.window)[1][-1]), mark.window + 1)
            if position < following.position:
                return mark
            self.take(following)
            mark = following

    def _window(self, window: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the chunks of a window, and where the samples of each end among those of the window."""
        if self._last is None or self._last[0] != window:
            chunks = self.chunks(window)
            self._last = window, chunks, np.cumsum(self._sizes(chunks))
        return self._last[1:]
