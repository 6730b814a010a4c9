"""The search for the best split of a model into pipeline stages.

With one stage on each rank this is the linear partition problem, which dynamic programming solves (PipeDream,
Narayanan et al. 2019, doi:10.1145/3341301.3359646, section 3.1).

With several stages on a rank their work adds up, wherever they lie in the model: looped, V-shaped or
otherwise. A *move* takes one piece from one stage and gives one to another, by shifting the boundaries
between them by one; the stages between keep their number of pieces. From a few first splits, the search
follows the best move until none helps. Then it looks at all splits in turn, skips those that cannot beat the
best known one, and stops after a fixed number of steps. So small problems are solved exactly, and equal
problems give equal results.

The best split into stages on one rank each: the linear partition problem, solved exactly.

First the least possible largest stage L. If a bound is kept when every stage takes all that it may, it can be
kept; if pieces are left over then, it cannot, since this leaves least for the rest. A third case is rare: a
stage cannot take even one piece, because stages weigh pieces differently, and a stage before it could leave
it another one. Then all places where stages can end decide. So L is found by bisection, between a bound that
cannot be kept and the largest stage of a known split.

Then, of the splits with no stage above L, the one with the least sum of squares, by dynamic programming over
stages (PipeDream, Narayanan et al. 2019, doi:10.1145/3341301.3359646, section 3.1). A stage ends no later
than if all stages take all they may, and no earlier than the stages after it can take the rest: there are few
places between these two. The search back over `start` stops once even equal stages before it would be worse,
as

    before^2 / stages + time^2

is a lower bound that grows from the point where all stages are equal.

Follow the best move from a split to better ones.

A *move* takes one piece from one stage, the giver, and gives one to another, the taker. It shifts the
boundaries between them by one, so that the stages between keep their number of pieces. For a giver, takers
are tried from the nearest on: the stages up to each are already shifted, so that a move changes only two
stages more.

Most improvements are moves from the rank that has most, or from the largest stage. If none of these helps,
and there are not too many stages, all moves are tried. If none helps, the search ends.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

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


_EQUAL = 1e-12
"""Bisection ends when its bounds differ by less than this, relatively."""


def partition(times: Amounts, memory: Amounts, stages: int, limit: float) -> tuple[int, ...] | None:
    """Return the split with the least largest stage; among these, the one with the least sum of squares.

    Args:
        times: Times of the pieces.
        memory: Memory of the pieces, in bytes.
        stages: Number of stages.
        limit: Bytes that a stage may hold.

    Returns:
        The number of pieces of each stage; None if no split keeps within the limit.
    """
    found = _within(times, memory, stages, limit, math.inf)
    if found is None:
        return None
    low, high = 0.0, _largest(times, found.ends)
    while high - low > _EQUAL * high:
        middle = (low + high) / 2
        shorter = _within(times, memory, stages, limit, middle)
        if shorter is None:
            low = middle
        else:
            found, high = shorter, _largest(times, shorter.ends)
    return _most_even(times, memory, limit, high, found.furthest)


class _Found(NamedTuple):
    """A split within a bound.

    Attributes:
        ends: The end of each stage.
        furthest: For each stage, a place after which it ends in no split within the bound.
    """

    ends: list[int]
    furthest: list[int]


def _within(times: Amounts, memory: Amounts, stages: int, limit: float, bound: float) -> _Found | None:
    """Return a split within a bound; None if there is none."""
    ends = _furthest(times, memory, stages, limit, bound)
    if len(ends) == stages:
        return _Found(ends, ends) if ends[-1] == times.pieces else None
    return _among_all(times, memory, stages, limit, bound)


def _furthest(times: Amounts, memory: Amounts, stages: int, limit: float, bound: float) -> list[int]:
    """Return the end of each stage if each takes all it may and leaves one piece per later stage.

    The list ends before the first stage that cannot take any piece.
    """
    ends, start = [], 0
    for stage in range(stages):
        low, high = start, times.pieces - (stages - stage - 1)
        while low < high:
            stop = (low + high + 1) // 2
            if times.of(stage, start, stop) <= bound and memory.of(stage, start, stop) <= limit:
                low = stop
            else:
                high = stop - 1
        if low == start:
            break
        start = low
        ends.append(start)
    return ends


def _among_all(times: Amounts, memory: Amounts, stages: int, limit: float, bound: float) -> _Found | None:
    """Return a split within a bound, found among all places where stages can end; None if there is none."""
    starts: list[dict[int, int]] = []  # by stage: where it can end, and one start for each
    reached = [0]
    for stage in range(stages):
        last, here = times.pieces - (stages - stage - 1), dict[int, int]()
        for start in reached:
            for end in range(start + 1, last + 1):
                if times.of(stage, start, end) > bound or memory.of(stage, start, end) > limit:
                    break
                here.setdefault(end, start)
        starts.append(here)
        reached = sorted(here)
    if times.pieces not in starts[-1]:
        return None
    ends = [times.pieces]
    for here in reversed(starts[1:]):
        ends.append(here[ends[-1]])
    return _Found(ends[::-1], [max(here) for here in starts])


def _earliest(times: Amounts, memory: Amounts, limit: float, bound: float, stages: int) -> list[int]:
    """Return the start of each stage if all stages, from the last one on, take all that they may."""
    starts, stop = [], times.pieces
    for stage in reversed(range(stages)):
        low, high = stage, stop - 1
        while low < high:
            start = (low + high) // 2
            if times.of(stage, start, stop) <= bound and memory.of(stage, start, stop) <= limit:
                high = start
            else:
                low = start + 1
        stop = high
        starts.append(stop)
    return starts[::-1]


def _most_even(
    times: Amounts, memory: Amounts, limit: float, bound: float, furthest: list[int]
) -> tuple[int, ...]:
    """Return the split with the least sum of squares; `best[end]` is for the pieces before `end`."""
    stages, pieces = len(furthest), times.pieces
    earliest = [*_earliest(times, memory, limit, bound, stages)[1:], pieces]
    best: dict[int, float] = {0: 0.0}
    cuts: list[dict[int, int]] = []
    for stage, (first, last) in enumerate(zip(earliest, furthest, strict=True)):
        after: dict[int, float] = {}
        cut: dict[int, int] = {}
        for end in range(first, last + 1):
            least = math.inf
            for start in range(end - 1, stage - 1, -1):
                time = times.of(stage, start, end)
                if time > bound or memory.of(stage, start, end) > limit:
                    break  # a longer stage has more of both
                before = times.least(0, start)
                if before < stage * time and before * before > stage * (least - time * time):
                    break
                value = best.get(start, math.inf) + time * time
                if value < least:
                    least, cut[end] = value, start
            if least < math.inf:
                after[end] = least
        best = after
        cuts.append(cut)
    ends = [pieces]
    for cut in reversed(cuts):
        ends.append(cut[ends[-1]])
    ends.reverse()
    return tuple(end - start for start, end in itertools.pairwise(ends))


def _largest(times: Amounts, ends: list[int]) -> float:
    starts = [0, *ends[:-1]]
    return max(times.of(stage, *each) for stage, each in enumerate(zip(starts, ends, strict=True)))


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
