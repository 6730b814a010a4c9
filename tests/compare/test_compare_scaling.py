"""The law of scaling: its coefficients come back; its special cases are Amdahl and the straight line."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.analyze.compare.scaling import ScalingLaw

LAWS = st.builds(
    ScalingLaw, st.floats(1, 1e6), st.floats(0, 0.5), st.one_of(st.just(0.0), st.floats(1e-5, 0.05))
)


@given(LAWS)
def test_the_fit_returns_the_law_that_made_the_speeds(law):
    ranks = [1, 2, 4, 8, 16]
    found = ScalingLaw.fit(ranks, [law.tokens_per_second(n) for n in ranks])
    assert found.rate == pytest.approx(law.rate, rel=1e-4)
    for n in (3, 32, 64):
        assert found.tokens_per_second(n) == pytest.approx(law.tokens_per_second(n), rel=1e-3)


def test_without_coherence_it_is_amdahls_law():
    law = ScalingLaw(100.0, 0.1, 0.0)
    assert law.tokens_per_second(8) == pytest.approx(100 / (0.1 + 0.9 / 8))
    assert math.isinf(law.most)


def test_the_highest_speed_is_where_it_says():
    law = ScalingLaw(100.0, 0.02, 0.001)
    speeds = [law.tokens_per_second(n) for n in range(1, 200)]
    assert int(np.argmax(speeds)) + 1 == pytest.approx(law.most, abs=1)


def test_two_numbers_of_ranks_fix_amdahls_law_and_one_fixes_none():
    law = ScalingLaw.fit([1, 4], [100.0, 300.0])
    assert law.coherence == 0
    assert law.tokens_per_second(4) == pytest.approx(300)
    assert ScalingLaw.fit([4, 4], [300.0, 310.0]) is None


def test_coefficients_are_never_below_zero():
    law = ScalingLaw.fit([1, 2, 4, 8], [100.0, 210.0, 430.0, 880.0])  # better than in proportion
    assert law.contention == law.coherence == 0
