"""A Plan whose schedule is found by search."""

import pytest

from shoal.spec.plan import Plan, SettledPlan, legal_plans
from shoal.spec.plan import plan as module
from shoal.spec.plan.schedules import Times, make, play, require_sound


@pytest.mark.parametrize("settings", ["", "virtual=2", "virtual=3", "virtual=2,activations=3"])
def test_the_table_is_sound_and_placed_alike_for_any_number_of_micro_batches(settings):
    plan = Plan.parse(f"pp=4,schedule=search,{settings}")
    for micro_batches in (1, 2, 5, 12):
        schedule = plan.schedule_for(micro_batches)
        require_sound(schedule)
        assert schedule.microbatches == micro_batches
        assert schedule.placement == plan.placement
    assert (plan.placement[-1] == 0) == (plan.stages == 8)


@pytest.mark.parametrize("virtual", [1, 2, 3])
@pytest.mark.parametrize("activations", [None, 3, 7])
def test_no_rank_holds_more_than_is_asked_for_and_by_default_no_more_than_1f1b(virtual, activations):
    plan = Plan(pp=4, schedule="search", virtual=virtual, activations=activations)
    schedule = plan.schedule_for(12)
    most = max(make("1f1b", 4, 1, 12).peak_activations(rank) for rank in range(4)) * virtual
    assert max(map(schedule.peak_activations, range(4))) <= (most if activations is None else activations)


def test_it_is_found_for_the_times_of_the_stages():
    """With a long last stage it is shorter than what is found for equal ones, and than the named one."""
    plan = Plan(pp=4, schedule="search", virtual=2)
    each = (*[1.0] * 7, 2.0)
    times = Times(each, each, each, (0.0,) * 7)
    found = play(plan.schedule_for(8, times), times).makespan
    assert found < play(plan.schedule_for(8), times).makespan
    assert found < play(make("zb-v", 4, 2, 8), times).makespan


def test_a_plan_is_made_fitted_and_listed_without_a_search(monkeypatch):
    monkeypatch.setattr(module, "search", None)
    plan = SettledPlan.of(Plan.parse("pp=4,schedule=search,virtual=2,split=count"), 32)
    assert plan.stages == len(plan.placement) == 8
    assert plan.has_halves
    assert plan.microbatch == 2
    assert "search" in {each.schedule for each in legal_plans(2)}
