"""The least of a function of positive numbers."""

import math

from hypothesis import given
from hypothesis import strategies as st

from shoal.machine.probe.fit import least


@given(st.floats(1e-3, 1.0), st.floats(1.0, 1e4))
def test_the_least_of_a_smooth_function_is_found_within_a_thousandth_of_its_bounds(first, second):
    def distance(values):
        return math.log(values[0] / first) ** 2 + math.log(values[1] / second) ** 2

    found = least(distance, [(1e-3, 1.0), (1.0, 1e4)])
    # The search ends where steps of a thousandth lead nowhere better.
    assert math.isclose(found[0], first, rel_tol=2e-3)
    assert math.isclose(found[1], second, rel_tol=2e-3)


def test_numbers_stay_within_their_bounds():
    assert math.isclose(least(lambda values: -values[0], [(0.5, 2.0)])[0], 2.0)
    assert math.isclose(least(lambda values: values[0], [(0.5, 2.0)])[0], 0.5)
