"""Set operations on times, as sorted lists of disjoint half-open intervals [start, stop).

`union` makes such a list from any intervals; the other functions take and return such lists, each in one
pass. Nothing is rounded: every bound of a result is a bound of an argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]
Intervals = list[Interval]


def union(intervals: Iterable[Interval]) -> Intervals:
    """Return the times in any of the intervals, which may be unordered and overlap; empty ones vanish."""
    merged: Intervals = []
    for start, stop in sorted(intervals):
        if start >= stop:
            continue
        if merged and start <= merged[-1][1]:
            if stop > merged[-1][1]:
                merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged


def intersect(left: Sequence[Interval], right: Sequence[Interval]) -> Intervals:
    """Return the times in both."""
    common: Intervals = []
    i = j = 0
    while i < len(left) and j < len(right):
        start = max(left[i][0], right[j][0])
        stop = min(left[i][1], right[j][1])
        if start < stop:
            common.append((start, stop))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return common


def subtract(left: Sequence[Interval], right: Sequence[Interval]) -> Intervals:
    """Return the times in `left` and not in `right`."""
    rest: Intervals = []
    j = 0
    for start, stop in left:
        while j < len(right) and right[j][1] <= start:
            j += 1
        k = j
        while k < len(right) and right[k][0] < stop:
            if start < right[k][0]:
                rest.append((start, right[k][0]))
            start = right[k][1]
            k += 1
        if start < stop:
            rest.append((start, stop))
    return rest


def length(intervals: Sequence[Interval]) -> float:
    """Return the total length of the intervals, in seconds."""
    return sum(stop - start for start, stop in intervals)
