"""The work and memory of a split's stages and ranks, and the split's score."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

Score = tuple[float, ...]
"""The score of a split; less is better: memory above the limit, time of a step, and so on."""


class Amounts:
    """The amount of consecutive pieces as a stage.

    Args:
        each: Fixed amount of each piece.
        kept: Amount of each piece that is added as often as `held` says.
        held: By stage, the factor on `kept`; None for 0 everywhere.
        factors: By stage, the factor on `each`; None for 1 everywhere.
    """

    def __init__(
        self,
        each: Sequence[float],
        kept: Sequence[float] = (),
        held: Sequence[float] | None = None,
        factors: Sequence[float] | None = None,
    ) -> None:
        self.pieces = len(each)
        self._held = held
        self._factors = factors
        self._least = 1.0 if factors is None else min(factors)
        self._before = _sums_before(each)
        self._kept_before = _sums_before(kept)

    def of(self, stage: int, start: int, stop: int) -> float:
        """Return the amount of this stage, made of the pieces from `start` to before `stop`."""
        amount = self._before[stop] - self._before[start]
        if self._factors is not None:
            amount *= self._factors[stage]
        if self._held is not None:
            amount += self._held[stage] * (self._kept_before[stop] - self._kept_before[start])
        return amount

    def least(self, start: int, stop: int) -> float:
        """Return the least amount of these pieces, over all stages that they may be in."""
        return self._least * (self._before[stop] - self._before[start])


class Load:
    """The work and memory of ranks.

    Args:
        times: Times of the pieces.
        memory: Memory of the pieces, in bytes.
        placement: The rank of each stage.
        limit: Bytes that a rank may hold.
        weight: Factor on the largest stage, relative to the work of the rank that has most.
    """

    def __init__(
        self,
        times: Amounts,
        memory: Amounts,
        placement: Sequence[int],
        limit: float,
        weight: float,
    ) -> None:
        self.times = times
        self.memory = memory
        self.placement = placement
        self.limit = limit
        self.weight = weight

    def score(self, split: Sequence[int]) -> Score:
        """Return memory above the limit, a rank's most work plus weighted largest stage, sums of squares.

        The sums, over ranks and over stages, lead a search across splits with equal maxima.
        """
        stages, ranks = [], dict.fromkeys(self.placement, 0.0)
        held = dict(ranks)
        start = 0
        for stage, (rank, count) in enumerate(zip(self.placement, split, strict=True)):
            stop = start + count
            stages.append(self.times.of(stage, start, stop))
            ranks[rank] += stages[-1]
            held[rank] += self.memory.of(stage, start, stop)
            start = stop
        squares = sum(time * time for time in ranks.values()), sum(time * time for time in stages)
        above = max(0.0, max(held.values()) - self.limit)
        return (above, max(ranks.values()) + self.weight * max(stages), *squares)


def _sums_before(values: Sequence[float]) -> list[float]:
    return list(itertools.accumulate(values, initial=0.0))
