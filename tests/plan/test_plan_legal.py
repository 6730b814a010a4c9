"""Every legal Plan is listed once, and nothing else."""

from __future__ import annotations

import itertools

import pytest

from shoal.errors import PlanError
from shoal.spec.plan import Plan
from shoal.spec.plan.enumerate import VARIED, legal_plans


@pytest.mark.parametrize("ranks", [1, 2, 4, 6, 8])
def test_plans_are_those_that_trying_every_combination_finds(ranks):
    varied = {"shard": VARIED["shard"]}
    found = set()
    numbers = range(1, ranks + 1)
    for dp, tp, pp, cp, replicate in itertools.product(numbers, repeat=5):
        if dp * tp * pp * cp != ranks:
            continue
        for ep, shard in itertools.product(numbers, varied["shard"]):
            try:
                found.add(Plan(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, replicate=replicate, shard=shard))
            except PlanError:
                continue
    plans = legal_plans(ranks, varied=varied)
    assert len(plans) == len(set(plans))
    assert set(plans) == found


def test_a_choice_of_a_degree_is_varied_only_where_the_degree_is():
    plans = legal_plans(2)
    assert {plan.tensor for plan in plans if plan.tp == 1} == {VARIED["tensor"][0]}
    assert {plan.tensor for plan in plans if plan.tp == 2} == set(VARIED["tensor"])
    assert {plan.context for plan in plans if plan.cp == 2} == set(VARIED["context"])


def test_what_is_required_leaves_plans_out():
    def require(plan):
        if plan.tp > 1:
            raise PlanError("no", possible="tp=1", change="leave it out")

    plans = legal_plans(4, require=require)
    assert plans
    assert all(plan.tp == 1 and plan.ranks == 4 for plan in plans)


def test_no_ranks_are_refused():
    with pytest.raises(PlanError, match="0 ranks"):
        legal_plans(0)
