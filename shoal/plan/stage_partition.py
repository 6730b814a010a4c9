"""The best split into stages on one rank each: the linear partition problem, solved exactly.

First the least possible largest stage L. A bound can be kept exactly if it is kept when every stage takes all
that it may, since this leaves least for the rest. So L is found by bisection, between a bound that cannot be
kept and the largest stage of a known split.

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

from shoal.plan.stage_load import Amounts

__all__ = ["partition"]

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
    ends = _furthest(times, memory, stages, limit, math.inf)
    if ends is None:
        return None
    low, high = 0.0, _largest(times, ends)
    while high - low > _EQUAL * high:
        middle = (low + high) / 2
        shorter = _furthest(times, memory, stages, limit, middle)
        if shorter is None:
            low = middle
        else:
            ends, high = shorter, _largest(times, shorter)
    return _most_even(times, memory, limit, high, ends)


def _furthest(times: Amounts, memory: Amounts, stages: int, limit: float, bound: float) -> list[int] | None:
    """Return the end of each stage if each takes all it may and leaves one piece per later stage."""
    ends, start = [], 0
    for stage in range(stages):
        last, stop = times.pieces - (stages - stage - 1), start
        low, high = start, last
        while low < high:
            stop = (low + high + 1) // 2
            if times.of(stage, start, stop) <= bound and memory.of(stage, start, stop) <= limit:
                low = stop
            else:
                high = stop - 1
        if low == start:
            return None
        start = low
        ends.append(start)
    return ends if start == times.pieces else None


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
