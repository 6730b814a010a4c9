"""Turns: which of several sources gives the sample at each position, in the shares of their weights.

Of the first n positions, the first source has floor(n * w), where w is its share. The second source takes its
part of those that are left in the same way, and so on; the last one has the rest. So the number of positions
that a source had before any n is a formula, and never more than one off for each source before it. Positions
are taken in blocks; within a block a permutation mixes the sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import final

import numpy as np
from numpy.typing import NDArray

from shoal.data.permutation import order

_BLOCK = 1024


@final
class Turns:
    """The source of each position.

    Args:
        seed: Seed of the order of the sources within a block.
        weights: The weight of each source, positive.
    """

    def __init__(self, seed: int, weights: Sequence[float]) -> None:
        exact = [Fraction(weight) for weight in weights]
        self._seed = seed
        self._parts = [weight / sum(exact[place:]) for place, weight in enumerate(exact)]
        self._block = lru_cache(4)(self._make_block)

    def before(self, position: int) -> NDArray[np.int64]:
        """Return how many positions below this one each source has, `[sources]`."""
        block, offset = divmod(position, _BLOCK)
        within = np.bincount(self._block(block)[:offset], minlength=len(self._parts))
        return self._counts(block * _BLOCK) + within

    def sources(self, position: int, count: int) -> NDArray[np.int64]:
        """Return the source of each of the positions `[position, position + count)`."""
        first, last = position // _BLOCK, (position + count) // _BLOCK
        blocks = np.concatenate([self._block(block) for block in range(first, last + 1)])
        return blocks[position - first * _BLOCK :][:count]

    def _counts(self, position: int) -> NDArray[np.int64]:
        counts = []
        for part in self._parts:
            counts.append(position * part.numerator // part.denominator)
            position -= counts[-1]
        return np.array(counts, dtype=np.int64)

    def _make_block(self, block: int) -> NDArray[np.int64]:
        begin = block * _BLOCK
        counts = self._counts(begin + _BLOCK) - self._counts(begin)
        sources = np.repeat(np.arange(len(counts)), counts)
        return sources[order(self._seed, block, _BLOCK, np.arange(_BLOCK))]
