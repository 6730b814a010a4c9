"""Ranks that outnumber cores."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.cost.crowding import crowded_seconds


@given(st.floats(0.01, 10.0), st.floats(0.0, 1.0), st.floats(1.0, 8.0))
def test_a_step_is_never_quicker_than_its_work_or_its_longest_chain(step, share, crowding):
    seconds = crowded_seconds(step, share * step, crowding)
    assert seconds >= step - share * step
    assert seconds >= step / crowding
    assert seconds <= step


def test_a_rank_with_a_core_of_its_own_lends_nothing():
    assert crowded_seconds(2.0, 0.5, 1.0) == 2.0


def test_two_stages_that_take_turns_on_one_core_take_what_both_work():
    # Each works 1 s at half a core's rate and waits 1 s: on one core, 0.5 s each, one after the other.
    assert crowded_seconds(2.0, 1.0, 2.0) == 1.0
