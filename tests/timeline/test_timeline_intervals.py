"""The algebra of intervals, against sets of unit cells."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from shoal.spec.timeline.intervals import Intervals, intersect, length, subtract, union

# Bounds are small whole numbers, so that floats are exact and a set of unit cells is the same thing.
raw_intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=12)


def cells(intervals: Intervals) -> set[int]:
    return {cell for start, stop in intervals for cell in range(int(start), int(stop))}


def is_canonical(intervals: Intervals) -> bool:
    """Sorted, none empty, none overlapping another."""
    bounds = [bound for interval in intervals for bound in interval]
    return bounds == sorted(bounds) and all(start < stop for start, stop in intervals)


@given(raw_intervals)
def test_a_union_holds_each_moment_once(intervals: Intervals) -> None:
    result = union(intervals)
    assert is_canonical(result)
    assert cells(result) == cells(intervals)
    assert all(left[1] < right[0] for left, right in itertools.pairwise(result))


@given(raw_intervals, raw_intervals)
def test_an_intersection_holds_what_both_hold(left: Intervals, right: Intervals) -> None:
    result = intersect(union(left), union(right))
    assert is_canonical(result)
    assert cells(result) == cells(left) & cells(right)


@given(raw_intervals, raw_intervals)
def test_a_difference_holds_what_only_the_left_holds(left: Intervals, right: Intervals) -> None:
    result = subtract(union(left), union(right))
    assert is_canonical(result)
    assert cells(result) == cells(left) - cells(right)


@given(raw_intervals)
def test_the_length_is_the_number_of_cells(intervals: Intervals) -> None:
    assert length(union(intervals)) == len(cells(intervals))


@given(raw_intervals, raw_intervals)
def test_intersection_and_difference_split_the_left(left: Intervals, right: Intervals) -> None:
    whole, other = union(left), union(right)
    assert union(intersect(whole, other) + subtract(whole, other)) == whole
