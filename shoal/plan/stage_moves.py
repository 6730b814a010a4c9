"""Follow the best move from a split to better ones.

A *move* takes one piece from one stage, the giver, and gives one to another, the taker. It shifts the
boundaries between them by one, so that the stages between keep their number of pieces. For a giver, takers
are tried from the nearest on: the stages up to each are already shifted, so that a move changes only two
stages more.

Most improvements are moves from the rank that has most, or from the largest stage. If none of these helps,
and there are not too many stages, all moves are tried. If none helps, the search ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from shoal.plan.stage_load import Load, Score

_ALL = 40
"""Number of stages up to which all moves are tried: moves grow with its square."""


def descend(load: Load, split: tuple[int, ...]) -> tuple[int, ...]:
    """Return a split, not worse, that no move that was tried makes better."""
    score = load.score(split)
    while True:
        every = range(len(split) if len(split) <= _ALL else 0)
        for givers in (_burdened(load, split), every):
            found = min(moves(load, split, givers), default=None)
            if found is None:
                continue
            _, giver, taker = found
            moved = list(split)
            moved[giver] -= 1
            moved[taker] += 1
            better = load.score(moved)
            if better < score:  # not by rounding alone
                split, score = tuple(moved), better
                break
        else:
            return split


def _burdened(load: Load, split: Sequence[int]) -> list[int]:
    """Return the largest stage, and the stages of the ranks that have most work and most memory."""
    stages = _Stages(load, split)
    ranks = {max(range(len(each)), key=each.__getitem__) for each in (stages.rank_times, stages.rank_memory)}
    largest = max(range(len(split)), key=stages.times.__getitem__)
    return sorted({largest} | {stage for stage, rank in enumerate(load.placement) if rank in ranks})


def moves(load: Load, split: Sequence[int], givers: Iterable[int]) -> Iterator[tuple[Score, int, int]]:
    """Yield each move of these givers: the score of the new split, giver and taker."""
    for giver in givers:
        if split[giver] == 1:
            continue
        for takers, step in ((range(giver + 1, len(split)), -1), (range(giver - 1, -1, -1), 1)):
            stages = _Stages(load, split)
            stages.change(giver, max(step, 0), min(step, 0))
            for taker in takers:
                stages.change(taker, min(step, 0), max(step, 0))
                yield stages.score, giver, taker
                stages.change(taker, step, step)


class _Stages:
    """Times and memory of a split's stages and ranks, kept while boundaries are shifted.

    Args:
        load: The work and memory to share.
        split: Pieces of each stage.
    """

    def __init__(self, load: Load, split: Sequence[int]) -> None:
        self._load = load
        self._stops = list(itertools.accumulate(split))
        self._starts = [0, *self._stops[:-1]]
        places = list(enumerate(zip(self._starts, self._stops, strict=True)))
        self.times = [load.times.of(stage, *place) for stage, place in places]
        self._memory = [load.memory.of(stage, *place) for stage, place in places]
        self.rank_times = [0.0] * (max(load.placement) + 1)
        self.rank_memory = [0.0] * (max(load.placement) + 1)
        for rank, time, held in zip(load.placement, self.times, self._memory, strict=True):
            self.rank_times[rank] += time
            self.rank_memory[rank] += held
        self._squares = sum(time * time for time in self.rank_times)
        self._stage_squares = sum(time * time for time in self.times)

    @property
    def score(self) -> Score:
        """Return the score as `Load.score` does."""
        above = max(0.0, max(self.rank_memory) - self._load.limit)
        most = max(self.rank_times) + self._load.weight * max(self.times)
        return above, most, self._squares, self._stage_squares

    def change(self, stage: int, start: int, stop: int) -> None:
        """Shift the start and stop of a stage from those in the split."""
        start, stop = self._starts[stage] + start, self._stops[stage] + stop
        time, held = self._load.times.of(stage, start, stop), self._load.memory.of(stage, start, stop)
        rank, before = self._load.placement[stage], self.times[stage]
        busy = self.rank_times[rank]
        self.times[stage] = time
        self.rank_times[rank] = busy + time - before
        self._squares += self.rank_times[rank] ** 2 - busy * busy
        self._stage_squares += time * time - before * before
        self.rank_memory[rank] += held - self._memory[stage]
        self._memory[stage] = held
