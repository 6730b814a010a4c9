"""alpha and beta from measured times."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.predict.cost import fit_alpha_beta

STEPS = [1.0, 2.0, 2.0, 6.0, 6.0]
NBYTES = [1e3, 1e4, 1e5, 1e6, 1e8]


@given(alpha=st.floats(1e-7, 1e-3), beta=st.floats(1e-11, 1e-8), known=st.floats(0, 1e-4))
def test_times_of_a_straight_line_give_it_back(alpha, beta, known):
    seconds = [alpha * steps + beta * nbytes + known for steps, nbytes in zip(STEPS, NBYTES, strict=True)]
    fitted = fit_alpha_beta(STEPS, NBYTES, seconds, [known] * len(seconds))
    # What is fitted is the difference of time and known part, so it is as exact as that difference.
    largest = max(seconds[0], known) / (seconds[0] - known)
    assert fitted == pytest.approx((alpha, beta), rel=1e-9 * largest)


@given(st.lists(st.floats(1e-6, 1.0), min_size=len(STEPS), max_size=len(STEPS)))
def test_no_other_pair_that_is_not_below_zero_fits_better(seconds):
    def error(alpha, beta):
        times = alpha * np.array(STEPS) + beta * np.array(NBYTES)
        return float(((times / seconds - 1) ** 2).sum())

    alpha, beta = fit_alpha_beta(STEPS, NBYTES, seconds, [0.0] * len(seconds))
    assert alpha >= 0
    assert beta >= 0
    least = error(alpha, beta)
    for step in (1e-3, 1e-2, 0.3):
        for toward in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1)):
            other = (
                max(alpha + toward[0] * step * max(alpha, 1e-6), 0),
                max(beta + toward[1] * step * max(beta, 1e-12), 0),
            )
            assert error(*other) >= least * (1 - 1e-9)


def test_bytes_that_do_not_matter_leave_beta_at_zero():
    fitted = fit_alpha_beta([1.0, 1.0], [0.0, 0.0], [2e-6, 2e-6], [0.0, 0.0])
    assert fitted == pytest.approx((2e-6, 0.0))
