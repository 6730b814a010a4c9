"""The test of two series: exact, as large as it should be, and blind to what a machine does by itself."""

import itertools
import math
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from compare_runs import NOISES, differs, rates, real_pairs

from shoal.analyze.compare import FEWEST, Verdict
from shoal.analyze.compare.differences import pairs
from shoal.analyze.compare.significance import compare_pairs, compare_series, holm, mann_whitney, signed_rank

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


@given(st.sets(st.integers(1, 40), min_size=1, max_size=7), st.data())
def test_the_probability_of_pairs_is_the_share_of_all_signs_that_lie_as_far_to_one_side(sizes, data):
    sizes = sorted(sizes)  # the reference counts signs without ties
    signs = data.draw(st.tuples(*[st.sampled_from((-1, 1))] * len(sizes)))
    ranks = range(1, len(sizes) + 1)

    def to_one_side(chosen):
        above = sum(rank for rank, sign in zip(ranks, chosen, strict=True) if sign > 0)
        return min(above, sum(ranks) - above)

    every = list(itertools.product((-1, 1), repeat=len(sizes)))
    as_far = [chosen for chosen in every if to_one_side(chosen) <= to_one_side(signs)]
    differences = [size * sign for size, sign in zip(sizes, signs, strict=True)]
    assert signed_rank(differences) == pytest.approx(min(1.0, len(as_far) / len(every)))
    assert signed_rank([0.0] * len(sizes)) == 1


def test_steps_that_take_turns_or_overlap_are_paired_and_steps_one_after_the_other_are_not():
    turns = [0.1 * step for step in range(200)]
    assert pairs(turns[::2], turns[1::2]) == [(step, step) for step in range(100)]
    assert pairs(turns[1::2], turns[::2]) == [(step, step + 1) for step in range(99)]
    slower = [0.013 + 0.103 * step for step in range(190)]
    found = pairs(turns, slower)
    assert found == [(other, one) for one, other in pairs(slower, turns)]
    assert len(found) == 190
    assert all(0 <= turns[one] - slower[other] < 0.1 for one, other in found)
    assert pairs(turns, [30 + start for start in turns]) == []
    assert pairs(turns, [12 + start for start in turns]) == []  # side by side for a part only
    assert pairs([], turns) == pairs(turns, []) == []


def test_what_the_machine_does_to_both_of_a_pair_is_no_drift():
    draw = random.Random(2)
    machine = [1 + 0.5 * math.sin(step / 90) for step in range(800)]
    before = [level * (1 + draw.gauss(0, 0.02)) for level in machine]
    after = [level * (1.03 + draw.gauss(0, 0.02)) for level in machine]
    test = compare_pairs(list(zip(before, after, strict=True)))
    assert test.difference == pytest.approx(0.03, abs=0.005)
    assert test.low < test.difference < test.high
    assert test.probability < 1e-5
    assert test.drift < 0.1 * compare_series(before, after).drift


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
    everything = NOISES[-1]
    assert rates(everything, 1000, 25, 0.03, seed=5, in_turns=True) == (0, 25)


@pytest.mark.long
def test_none_is_invented_in_a_hundred_repetitions():
    for noise, steps in itertools.product(NOISES, (300, 1000)):
        assert rates(noise, steps, 100, 0.03, seed=7, in_turns=True)[0] == 0
        invented, _ = rates(noise, steps, 100, 0.03, seed=7)
        assert invented <= 1, noise.name  # a random walk may end anywhere
        if noise in NOISES[:2]:
            assert invented == 0


@pytest.mark.long
def test_equal_real_runs_show_no_difference_and_a_slower_forward_is_told(tmp_path):
    found = dict(real_pairs(tmp_path, 800, 0.3))
    assert not any(map(differs, found["equal"]))
    (forward,) = (row for row in found["slower"] if row.name == "forward")
    assert forward.verdict == Verdict.HIGHER
    assert forward.test.is_paired
