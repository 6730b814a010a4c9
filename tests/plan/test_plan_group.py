"""Patterns of ranks, held to their enumeration."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from shoal.spec.plan.group import Group, split_dims


@st.composite
def nested(draw):
    """Dims, outermost first, with gaps between them."""
    dims, stride = [], draw(st.integers(1, 3))
    for number, gap in draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), max_size=4)):
        dims.insert(0, (number, stride))
        stride *= number * gap
    return dims


def enumerated(dims):
    ranges = (range(0, number * stride, stride) for number, stride in dims)
    return sorted(sum(offsets) for offsets in itertools.product(*ranges))


@given(nested(), st.integers(0, 5))
def test_a_pattern_has_the_ranks_of_its_dims(dims, first):
    group = Group.along(dims)
    assert group.ranks(first) == tuple(first + offset for offset in enumerated(dims))
    assert group.size == math.prod(number for number, _ in dims)
    assert Group.along(group.dims) == group


@given(nested(), st.integers(1, 3))
def test_patterns_tile_all_ranks(dims, times):
    group = Group.along(dims)
    ranks = times * max((number * stride for number, stride in dims), default=1)
    tiles = group.tile(ranks)
    assert sorted(itertools.chain(*tiles)) == list(range(ranks))
    assert all(members == group.ranks(members[0]) for members in tiles)


@given(nested(), st.integers(1, 300))
def test_a_pattern_counts_its_ranks_among_the_first_devices(dims, devices):
    group = Group.along(dims)
    assert group.within(devices) == sum(rank < devices for rank in group.ranks(0))


@given(nested(), st.integers(1, 24))
def test_dims_are_split_into_neighbours_and_the_rest_or_not_at_all(dims, inner):
    ranks, parted = enumerated(dims), split_dims(dims, inner)
    if parted is None:
        # So many neighbours are no part of the whole, or not at equal distances from one part to the next.
        parts = list(zip(*[iter(ranks)] * inner, strict=False))
        alike = {tuple(rank - part[0] for rank in part) for part in parts}
        assert len(ranks) % inner or len(alike) > 1 or inner > len(ranks)
        return
    outer, neighbours = parted
    assert enumerated(neighbours) == ranks[:inner]
    assert enumerated([*outer, *neighbours]) == ranks


@given(nested(), st.integers(0, 5))
def test_a_pattern_is_found_in_its_ranks(dims, first):
    group = Group.along(dims)
    assert Group.of(group.ranks(first)[::-1]) == group


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4))
def test_runs_of_neighbours_are_at_equal_distances(number, run, gap):
    ranks = Group(number * run, run + gap, run).ranks(0)
    assert ranks == tuple(first * (run + gap) + rank for first in range(number) for rank in range(run))
