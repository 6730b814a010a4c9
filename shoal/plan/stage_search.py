"""The search for the best split of a model into pipeline stages.

With one stage on each rank this is the linear partition problem, which dynamic programming solves (PipeDream,
Narayanan et al. 2019, doi:10.1145/3341301.3359646, section 3.1).

With several stages on a rank their work adds up, wherever they lie in the model: looped, V-shaped or
otherwise. A *move* takes one piece from one stage and gives one to another, by shifting the boundaries
between them by one; the stages between keep their number of pieces. From a few first splits, the search
follows the best move until none helps. Then it looks at all splits in turn, skips those that cannot beat the
best known one, and stops after a fixed number of steps. So small problems are solved exactly, and equal
problems give equal results.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from shoal.plan.stage_load import Load
from shoal.plan.stage_moves import descend
from shoal.plan.stage_partition import partition

__all__ = ["search_split"]

_STEPS = 480_000
"""Stages that are tried in the exhaustive part, times their number: about 0.2 s."""

_CLOSE = 1 - 1e-12
"""Sums in another order differ by less than this."""


def search_split(load: Load) -> tuple[int, ...] | None:
    """Return the best split that is found, or None if none is found within the memory limit."""
    stages = len(load.placement)
    if len(set(load.placement)) == stages:
        split = partition(load.times, load.memory, stages, load.limit)
        # Each stage there takes as much as it can; this misses splits whose later stages hold less.
        if split is not None or load.limit == math.inf:
            return split
    best = min((descend(load, first) for first in _first_splits(load)), key=load.score)
    best = _Exhaustive(load, best).run()
    return None if load.score(best)[0] > 0 else best


def _first_splits(load: Load) -> Iterator[tuple[int, ...]]:
    """Yield splits with stages that are even in number of pieces, in time and in memory."""
    stages = len(load.placement)
    even, more = divmod(load.times.pieces, stages)
    yield tuple(even + (stage < more) for stage in range(stages))
    for values in (load.times,) if load.limit == math.inf else (load.times, load.memory):
        split = partition(values, values, stages, math.inf)
        assert split is not None
        yield split


class _Exhaustive:
    """Depth-first search over the ends of stages, in order, with a lower bound on the rest.

    Args:
        load: The work and memory to share.
        best: The best split known.
    """

    def __init__(self, load: Load, best: tuple[int, ...]) -> None:
        self._load = load
        self._best = best
        self._score = load.score(best)
        self._steps = 0
        last = {rank: stage for stage, rank in enumerate(load.placement)}
        self._later = [
            [rank for rank, final in last.items() if final >= stage] for stage in range(len(load.placement))
        ]

    def run(self) -> tuple[int, ...]:
        """Return the best split."""
        zeros = dict.fromkeys(self._load.placement, 0.0)
        self._place((), 0, 0.0, zeros, zeros)
        return self._best

    def _place(
        self,
        split: tuple[int, ...],
        start: int,
        largest: float,
        times: dict[int, float],
        held: dict[int, float],
    ) -> None:
        """Try all ends of the next stage, given the ends before it and the ranks' load up to there."""
        load, stage, pieces = self._load, len(split), self._load.times.pieces
        if stage == len(load.placement):
            score = load.score(split)
            if score < self._score:
                self._best, self._score = split, score
            return
        left = load.times.least(start, pieces)
        if left * _CLOSE > sum(self._most(largest) - times[rank] for rank in self._later[stage]):
            return  # the ranks of the later stages cannot take the rest
        rank, behind = load.placement[stage], len(load.placement) - stage - 1
        for stop in range(start + 1 if behind else pieces, pieces - behind + 1):
            added = load.times.of(stage, start, stop)
            time, most = times[rank] + added, max(largest, added)
            memory = held[rank] + load.memory.of(stage, start, stop)
            self._steps += 1
            if (
                self._steps * len(load.placement) > _STEPS
                or time * _CLOSE > self._most(most)
                or memory * _CLOSE > load.limit
            ):
                return  # a longer stage has more of each
            self._place((*split, stop - start), stop, most, times | {rank: time}, held | {rank: memory})

    def _most(self, largest: float) -> float:
        """Return the most work of a rank in a split with such a largest stage that may be the best."""
        return self._score[1] - self._load.weight * largest if self._score[0] == 0 else math.inf
