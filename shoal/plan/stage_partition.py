"""The best split into stages on one rank each: the linear partition problem, solved exactly.

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
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

from shoal.plan.stage_load import Amounts

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
