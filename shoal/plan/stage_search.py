"""The search for the best split of a model into pipeline stages.

With one stage on each rank this is the linear partition problem, which dynamic programming solves (PipeDream,
Narayanan et al. 2019, doi:10.1145/3341301.3359646, section 3.1).

With several, the work of a rank's stages adds up, wherever they lie in the model: looped, V-shaped or
otherwise. A *move* takes one piece from one stage and gives one to another, by shifting the boundaries
between them by one; the stages between keep their number of pieces. From a few first splits, the search
follows the best move until none helps. Then it looks at all splits in turn, leaves out those that cannot beat
the best known one, and stops after a fixed number of steps. So small problems are solved exactly, and each
gives the same result each time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

__all__ = ["Amounts", "Load", "partition", "search_split"]

_STEPS = 60_000
"""Stages that are tried in the exhaustive part: about 0.2 s."""

_CLOSE = 1 - 1e-12
"""Sums in another order differ by less."""

Score = tuple[float, ...]
"""How good a split is, less being better: memory above the limit, time of a step, and so on."""


class Amounts:
    """What pieces in a row come to as a stage.

    Args:
        each: Of each piece.
        kept: Of each piece, what comes to it as often as `held` says.
        held: By stage, how often; 0 for all if None.
    """

    def __init__(
        self, each: Sequence[float], kept: Sequence[float] = (), held: Sequence[float] | None = None
    ) -> None:
        self.pieces = len(each)
        self._held = held
        self._before = _sums_before(each)
        self._kept_before = _sums_before(kept)

    def of(self, stage: int, start: int, stop: int) -> float:
        """Of the pieces from `start` to before `stop` as that stage."""
        amount = self.least(start, stop)
        if self._held is not None:
            amount += self._held[stage] * (self._kept_before[stop] - self._kept_before[start])
        return amount

    def least(self, start: int, stop: int) -> float:
        """The least that these pieces come to, whichever stages they are in."""
        return self._before[stop] - self._before[start]


class Load:
    """What ranks have to do and to hold.

    Args:
        times: Of the pieces.
        memory: Of the pieces, in bytes.
        placement: The rank of each stage.
        limit: Bytes that a rank may hold.
        weight: What the largest stage counts beside the work of the rank that has the most.
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
        """Memory above the limit, most work of a rank plus weighted largest stage, and sums of squares.

        The last two, over ranks and over stages, lead a search across splits that differ in no maximum.
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


def search_split(load: Load) -> tuple[int, ...] | None:
    """The best split that is found, or None if none is found within the memory limit."""
    stages = len(load.placement)
    if len(set(load.placement)) == stages:
        return partition(load.times, load.memory, stages, load.limit)
    best = min((_descend(load, first) for first in _first_splits(load)), key=load.score)
    best = _Exhaustive(load, best).run()
    return None if load.score(best)[0] > 0 else best


def partition(times: Amounts, memory: Amounts, stages: int, limit: float) -> tuple[int, ...] | None:
    """The split with the least largest stage, and among such with the least sum of squares; exact.

    Args:
        times: Of the pieces.
        memory: Of the pieces, in bytes.
        stages: How many there are.
        limit: Bytes that a stage may hold.

    Returns:
        The number of pieces of each stage; None if no split keeps within the limit.
    """
    worst = _fewest(times, memory, stages, limit, bound=math.inf, squared=False)
    if worst is None:
        return None
    even = _fewest(times, memory, stages, limit, bound=worst[0], squared=True)
    assert even is not None
    return even[1]


def _fewest(
    times: Amounts,
    memory: Amounts,
    stages: int,
    limit: float,
    *,
    bound: float,
    squared: bool,
) -> tuple[float, tuple[int, ...]] | None:
    """Least largest stage, or least sum of squared stages none of which is above `bound`; with its split.

    `best[end]` is the least value for the pieces before `end`, over one more stage in each round.
    """
    pieces = times.pieces
    best = [0.0] + [math.inf] * pieces
    cuts = []
    for stage in range(stages):
        after, cut = [math.inf] * (pieces + 1), [0] * (pieces + 1)
        for end in range(stage + 1, pieces + 1):
            for start in range(end - 1, stage - 1, -1):
                time = times.of(stage, start, end)
                held = memory.of(stage, start, end)
                if held > limit or time > bound or (not squared and time > after[end]):
                    break  # a longer stage has more of both
                value = best[start] + time * time if squared else max(best[start], time)
                if value < after[end]:
                    after[end], cut[end] = value, start
        best = after
        cuts.append(cut)
    if best[pieces] == math.inf:
        return None
    ends = [pieces]
    for cut in reversed(cuts):
        ends.append(cut[ends[-1]])
    ends.reverse()
    return best[pieces], tuple(end - start for start, end in itertools.pairwise(ends))


def _sums_before(values: Sequence[float]) -> list[float]:
    return list(itertools.accumulate(values, initial=0.0))


def _first_splits(load: Load) -> Iterator[tuple[int, ...]]:
    """Stages that are even in number of pieces, in time and in memory."""
    stages = len(load.placement)
    even, more = divmod(load.times.pieces, stages)
    yield tuple(even + (stage < more) for stage in range(stages))
    for values in (load.times, load.memory):
        split = partition(values, values, stages, math.inf)
        assert split is not None
        yield split


def _descend(load: Load, split: tuple[int, ...]) -> tuple[int, ...]:
    score = load.score(split)
    while True:
        best = min(_moves(split), key=load.score, default=split)
        better = load.score(best)
        if better >= score:
            return split
        split, score = best, better


def _moves(split: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for giver, taker in itertools.permutations(range(len(split)), 2):
        if split[giver] > 1:
            moved = list(split)
            moved[giver] -= 1
            moved[taker] += 1
            yield tuple(moved)


class _Exhaustive:
    """Depth-first search over the ends of stages, in order, with a bound on what is left.

    Args:
        load: What is to be shared.
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
        """The best split."""
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
        """Tries all ends of the next stage, given the ends before it and what the ranks have by then."""
        load, stage, pieces = self._load, len(split), self._load.times.pieces
        if stage == len(load.placement):
            score = load.score(split)
            if score < self._score:
                self._best, self._score = split, score
            return
        left = load.times.least(start, pieces)
        if left * _CLOSE > sum(self._most(largest) - times[rank] for rank in self._later[stage]):
            return  # the ranks that have stages to come cannot take what is left
        rank, behind = load.placement[stage], len(load.placement) - stage - 1
        for stop in range(start + 1 if behind else pieces, pieces - behind + 1):
            added = load.times.of(stage, start, stop)
            time, most = times[rank] + added, max(largest, added)
            memory = held[rank] + load.memory.of(stage, start, stop)
            self._steps += 1
            if self._steps > _STEPS or time * _CLOSE > self._most(most) or memory * _CLOSE > load.limit:
                return  # a longer stage has more of all
            self._place((*split, stop - start), stop, most, times | {rank: time}, held | {rank: memory})

    def _most(self, largest: float) -> float:
        """The most work of a rank in a split with such a stage that may be the best."""
        return self._score[1] - self._load.weight * largest if self._score[0] == 0 else math.inf
