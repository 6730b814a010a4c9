"""Ranks that outnumber cores, against cores that are shared out moment by moment."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.predict.cost.time.step import crowded_seconds


def played(tasks, ranks):
    """When each task runs, (rank, seconds, tasks before it), if each rank does its own in order."""
    ends, free, moments = [], [0.0] * ranks, []
    for rank, seconds, before in tasks:
        start = max([free[rank], *(ends[each] for each in before)])
        free[rank] = start + seconds
        ends.append(free[rank])
        moments.append((start, free[rank]))
    return moments


def shared_out(tasks, ranks, cores):
    """Seconds until all are done, if at each moment those that can go on share the cores alike."""
    left = [seconds * cores / ranks for _, seconds, _ in tasks]  # of a whole core
    done = [False] * len(tasks)
    now = 0.0
    while not all(done):
        first = {}
        for index, (rank, _, before) in enumerate(tasks):
            if not done[index] and rank not in first:
                first[rank] = index if all(done[each] for each in before) else None
        able = [index for index in first.values() if index is not None]
        rate = min(1.0, cores / len(able))
        passed = min(left[index] for index in able) / rate
        now += passed
        for index in able:
            left[index] -= passed * rate
            done[index] = left[index] <= 1e-12
    return now


@st.composite
def programs(draw):
    ranks = draw(st.integers(2, 5))
    tasks = []
    for index in range(draw(st.integers(1, 12))):
        before = draw(st.sets(st.integers(0, index - 1), max_size=2)) if index else set()
        tasks.append((draw(st.integers(0, ranks - 1)), draw(st.floats(0.1, 3.0)), before))
    return tasks, ranks, draw(st.integers(1, ranks))


@given(programs())
def test_a_quicker_clock_is_cores_that_are_shared_out(program):
    tasks, ranks, cores = program
    busy = played(tasks, ranks)
    end = max(stop for _, stop in busy)
    expected = shared_out(tasks, ranks, cores)
    assert crowded_seconds(end, busy, ranks, cores) == pytest.approx(expected, rel=1e-6)


def test_ranks_that_always_work_lend_nothing():
    assert crowded_seconds(2.0, [(0.0, 2.0)] * 4, 4, 2) == 2.0


def test_two_stages_that_take_turns_on_one_core_take_what_both_work():
    # Each works 1 s at half a core's rate and waits 1 s: on one core, 0.5 s each, one after the other.
    assert math.isclose(crowded_seconds(2.0, [(0.0, 1.0), (1.0, 2.0)], 2, 1), 1.0)
