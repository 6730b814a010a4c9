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

_STEPS = 480_000
"""Stages that are tried in the exhaustive part, times their number: about 0.2 s."""

_CLOSE = 1 - 1e-12
"""Sums in another order differ by less than this."""


def search_split(load: Load) -> tuple[int, ...] | None:
    """Return the best split that is found, or None if none is found within the memory limit."""
    stages = len(load.placement)
    if len(set(load.placement)) == stages:
        return partition(load.times, load.memory, stages, load.limit)
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
        # The stages so far, and the ranks' load up to there.
        self._split: list[int] = []
        self._times = [0.0] * (max(load.placement) + 1)
        self._held = list(self._times)

    def run(self) -> tuple[int, ...]:
        """Return the best split."""
        self._place(0, 0.0)
        return self._best

    def _place(self, start: int, largest: float) -> None:
        """Try all ends of the next stage, given the ends before it, of which the largest takes so long."""
        load, times, held = self._load, self._times, self._held
        stage, stages, pieces = len(self._split), len(load.placement), load.times.pieces
        if stage == stages:
            score = load.score(self._split)
            if score < self._score:
                self._best, self._score = tuple(self._split), score
            return
        most = self._most(largest)
        if load.times.least(start, pieces) * _CLOSE > sum(
            [most - times[rank] for rank in self._later[stage]]
        ):
            return  # the ranks of the later stages cannot take the rest
        rank, behind = load.placement[stage], stages - stage - 1
        time, memory = times[rank], held[rank]
        for stop in range(start + 1 if behind else pieces, pieces - behind + 1):
            added = load.times.of(stage, start, stop)
            times[rank], longest = time + added, added if added > largest else largest
            held[rank] = memory + load.memory.of(stage, start, stop)
            self._steps += 1
            if (
                self._steps * stages > _STEPS
                or times[rank] * _CLOSE > self._most(longest)
                or held[rank] * _CLOSE > load.limit
            ):
                break  # a longer stage has more of each
            self._split.append(stop - start)
            self._place(stop, longest)
            self._split.pop()
        times[rank], held[rank] = time, memory

    def _most(self, largest: float) -> float:
        """Return the most work of a rank in a split with such a largest stage that may be the best."""
        return self._score[1] - self._load.weight * largest if self._score[0] == 0 else math.inf
