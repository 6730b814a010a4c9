"""Workers that are not equally fast: rates and staleness against formulas, and every share once."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.predict.simulate import Meeting, course_of

SLOW = [3.0, 1.0, 1.0, 1.0]  # seconds of a share


def test_in_rounds_all_wait_for_the_slowest():
    course = course_of(Meeting(alone=0.25, after=0.5), SLOW, 4 * 100)
    assert course.seconds == pytest.approx(100 * (3 + 0.25 + 0.5 + 0.25) - 0.25)  # nobody pulls at the end
    assert set(course.staleness) == {0}
    assert course.computing[1] == pytest.approx(1 / 4, rel=1e-2)


def test_without_a_bound_each_worker_has_its_own_pace():
    course = course_of(Meeting(staleness=math.inf, alone=0.25, after=0.5), SLOW, 10_000)
    rates = [1 / (seconds + 2 * 0.25 + 0.5) for seconds in SLOW]
    # while the updates take turns, at most three wait for one
    assert course.rate == pytest.approx(sum(rates), rel=0.35)
    assert course.shares[1] > 1.5 * course.shares[0]
    free = course_of(Meeting(staleness=math.inf), SLOW, 10_000)
    assert free.rate == pytest.approx(sum(1 / seconds for seconds in SLOW), rel=1e-3)
    assert free.mean_staleness == pytest.approx(3, abs=0.05)  # what three others made meanwhile, in the mean


def test_a_bound_lets_the_fast_wait_for_the_slowest_in_the_end():
    course = course_of(Meeting(staleness=4), SLOW, 4 * 500)
    assert course.rate == pytest.approx(4 / 3, rel=0.02)


def test_servers_that_are_always_busy_are_the_limit():
    course = course_of(Meeting(staleness=math.inf, alone=0.1, shared=0.1), [0.01] * 20, 5000)
    assert course.rate == pytest.approx(1 / 0.1, rel=0.01)


def test_a_quorum_does_not_wait_for_the_slow():
    course = course_of(Meeting(every=10, quorum=3, grace=0.5), SLOW, 40 * 100)
    # three fast workers and their grace; every third round has the slow one's
    assert course.rate == pytest.approx(3 * 10 / 10.5 + 10 / 31.5, rel=0.05)
    assert max(course.staleness) >= 2


def test_merges_cost_once_in_so_many_shares():
    course = course_of(Meeting(every=20, alone=2.0), [1.0] * 4, 4 * 20 * 50)
    assert course.seconds == pytest.approx(50 * (20 + 4) - 2)  # nobody pulls at the end


def test_a_lost_worker_costs_what_it_would_have_made():
    away = {2: (100.0, 200.0)}
    course = course_of(Meeting(staleness=math.inf), [1.0] * 4, 1200, away)
    assert course.seconds == pytest.approx((1200 + 100) / 4, abs=2)
    assert course.shares[2] < course.shares[0]
    in_rounds = course_of(Meeting(quorum=3), [1.0] * 4, 1200, away)
    assert in_rounds.seconds == pytest.approx((1200 + 100) / 4, abs=3)


@settings(max_examples=60)
@given(
    seconds=st.lists(st.floats(0.1, 5), min_size=1, max_size=5),
    staleness=st.sampled_from([0, 1, 3, math.inf]),
    every=st.integers(1, 4),
    shared=st.floats(0, 1),
    lost=st.booleans(),
)
def test_every_share_is_applied_once(seconds, staleness, every, shared, lost):
    meeting = Meeting(staleness=staleness, every=every, alone=0.2, shared=shared, after=0.1)
    away = {0: (3.0, 9.0)} if lost and len(seconds) > 1 else {}
    course = course_of(meeting, seconds, 60, away)
    assert sum(course.shares) == 60
    assert all(0 <= share <= 1 + 1e-9 for share in course.computing)
    # no faster than workers that never wait
    assert course.seconds >= 60 / sum(1 / each for each in seconds) - every * max(seconds)
