"""The test of two series: exact, as large as it should be, and blind to what a machine does by itself."""

import itertools
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from compare_runs import NOISES, differs, rates, real_pairs

from shoal.compare import FEWEST, Verdict
from shoal.compare.significance import compare_series, holm, mann_whitney

SAMPLES = st.lists(st.integers(0, 30), min_size=1, max_size=5)


@given(SAMPLES, SAMPLES)
def test_the_probability_is_the_share_of_all_orders_that_differ_as_much(first, second):
    def above(these, those):
        return sum(late > early for early in these for late in those)

    if len({*first, *second}) < len(first) + len(second):
        return  # the reference counts orders without ties
    together, pairs = [*first, *second], len(first) * len(second)
    least = min(above(first, second), above(second, first))
    orders = [set(chosen) for chosen in itertools.combinations(together, len(first))]
    as_far = [
        chosen
        for chosen in orders
        if min(u := above(chosen, [each for each in together if each not in chosen]), pairs - u) <= least
    ]
    assert mann_whitney(first, second) == pytest.approx(min(1.0, len(as_far) / len(orders)))


@given(SAMPLES, SAMPLES)
def test_ties_never_make_a_difference_more_probable_than_either_way_of_breaking_them(first, second):
    broken = [mann_whitney(first, [each + shift for each in second]) for shift in (-0.5, 0.5)]
    assert mann_whitney(first, second) >= min(broken) - 1e-12


def test_holms_correction_is_that_of_his_example():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_a_shift_is_measured_and_lies_in_its_interval():
    draw = random.Random(1)
    before = [1 + draw.gauss(0, 0.02) for _ in range(40 * FEWEST)]
    after = [1.03 + draw.gauss(0, 0.02) for _ in range(40 * FEWEST)]
    test = compare_series(before, after)
    assert test.difference == pytest.approx(0.03, abs=0.003)
    assert test.low < 0.03 < test.high
    assert test.high - test.low < 0.01
    assert test.is_beyond_drift(0.0)
    assert test.is_large()


def test_a_drift_is_measured_by_its_trend_or_by_its_quarters():
    rising = [1 + 0.1 * step / 1200 for step in range(1200)]
    hill = [1 + 0.1 * (300 <= step < 600) for step in range(1200)]
    assert compare_series(rising, rising).drift == pytest.approx(0.1, rel=0.01)
    assert compare_series(hill, hill).drift == pytest.approx(0.1, rel=0.01)
    following = compare_series(rising, [value + 0.1 for value in rising])
    assert following.probability < 1e-5
    assert not following.is_beyond_drift(0.0)  # the machine went on as before


def test_three_per_cent_are_found_and_nothing_is_invented():
    quiet = NOISES[0]
    assert rates(quiet, 1000, 25, 0.03, seed=3)[1] >= 22
    assert sum(rates(noise, 300, 20, 0.03, seed=4)[0] for noise in NOISES) <= 1


@pytest.mark.long
def test_none_is_invented_in_a_hundred_repetitions():
    for noise, steps in itertools.product(NOISES, (300, 1000)):
        invented, _ = rates(noise, steps, 100, 0.03, seed=7)
        assert invented <= 1, noise.name  # a random walk may end anywhere
        if noise in NOISES[:2]:
            assert invented == 0


@pytest.mark.long
def test_equal_real_runs_show_no_difference_and_a_slower_forward_is_told_or_laid_to_drift(tmp_path):
    """Other work on the machine decides which: it may make the runs themselves drift by more."""
    found = dict(real_pairs(tmp_path, 800, 0.3))
    assert not any(map(differs, found["equal"]))
    (forward,) = (row for row in found["slower"] if row.name == "forward")
    assert forward.verdict in (Verdict.HIGHER, Verdict.DRIFT)
    assert forward.test.difference > 0
