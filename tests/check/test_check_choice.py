"""Of many Plans those that are compared where all would take too long."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ConfigError
from shoal.spec.plan import DEGREES, Plan
from shoal.spec.plan.enumerate import legal_plans
from shoal.testing.check import covering, with_axes

PLANS = [plan for plan in legal_plans(8) if plan.pp == 1]


def pairs(plans):
    """Every two settings that stand together in one of the Plans, the degrees as one setting."""
    names = ("replicate", "shard", "tensor", "context", "recompute")
    return {
        pair
        for plan in plans
        for pair in itertools.combinations(
            [
                ("degrees", *(getattr(plan, degree) for degree in DEGREES)),
                *((name, getattr(plan, name)) for name in names),
            ],
            2,
        )
    }


@given(st.integers(1, 4))
def test_degrees_above_one_are_counted_with_ep_as_one(least):
    chosen = with_axes(PLANS, least)
    assert chosen == [p for p in PLANS if (p.dp > 1) + (p.tp > 1) + (p.cp > 1) + (p.ep > 1) >= least]
    assert Plan(dp=4, cp=2, ep=2) in with_axes(PLANS, 3)


def test_more_axes_than_there_are_are_refused():
    with pytest.raises(ConfigError, match=r"axes=5.*more than 4 degrees"):
        with_axes(PLANS, 5)


def test_a_sample_that_is_large_enough_has_every_pair_of_settings():
    sample = covering(PLANS, 200)
    assert len(sample) == 200 < len(PLANS) / 4
    assert pairs(sample) == pairs(PLANS)


@given(st.integers(1, 60))
def test_a_sample_is_of_different_plans_in_their_order_and_always_the_same(count):
    plans = PLANS[::17]
    sample = covering(plans, count)
    assert sample == [plan for plan in plans if plan in sample] == covering(plans, count)
    assert len(sample) == min(count, len(plans))


@pytest.mark.parametrize("count", [5, 20])
def test_a_sample_has_more_pairs_than_the_first_plans(count):
    assert len(pairs(covering(PLANS, count))) > 1.5 * len(pairs(PLANS[:count]))


@pytest.mark.parametrize("count", [0, -1])
def test_no_sample_is_refused(count):
    with pytest.raises(ConfigError, match=f"sample={count}"):
        covering(PLANS, count)
