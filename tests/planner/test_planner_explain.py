"""What is said of the best Plan: every figure is one of a Plan that was played."""

import dataclasses

import pytest

from shoal.errors import ClusterError, ConfigError, PlanError
from shoal.predict.cost import Costs
from shoal.predict.cost.memory.memory import memory_of
from shoal.predict.cost.outlook import band_between
from shoal.predict.planner import Search, choose
from shoal.predict.planner.search import SLACK
from shoal.predict.planner.space import usual_bucket
from shoal.predict.simulate import played_seconds
from shoal.spec.cluster import Cluster
from shoal.spec.plan import SettledPlan
from shoal.spec.workload import shape, workload_of

WORKLOAD = workload_of(shape("1b"))
CLUSTER = Cluster.parse("dgx-a100:16")


@pytest.fixture(scope="module")
def choice():
    return choose(WORKLOAD, CLUSTER, 64, limit=3)


@pytest.fixture(scope="module")
def explanation(choice):
    return choice.explain()


def test_the_parts_of_a_step_sum_to_it(choice):
    for each in choice.candidates:
        assert sum(each.parts.values()) == pytest.approx(each.seconds)
        assert each.seconds == played_seconds(each.costs, each.plan, 64)


def test_a_degree_at_another_value_is_the_best_where_one_other_degree_makes_up_for_it(choice, explanation):
    assert explanation.neighbours
    own = choice.best.degrees
    for each in explanation.neighbours:
        assert each.value in (getattr(own, each.degree) // 2, 2 * getattr(own, each.degree))

        def accept(degrees, each=each):
            changed = {name for name in own._fields if getattr(degrees, name) != getattr(own, name)}
            return getattr(degrees, each.degree) == each.value and len(changed - {"ep"}) <= 2

        found = Search(WORKLOAD, CLUSTER, 64).best(1, accept).best
        assert (each.best is None) == (found is None)
        if found is not None:
            assert (1 - SLACK) * each.best.seconds <= found.seconds <= each.best.seconds / (1 - SLACK)
            assert each.best.seconds >= (1 - SLACK) * explanation.winner.seconds


def test_without_a_limit_of_memory_no_plan_is_slower(explanation):
    assert explanation.unlimited.seconds <= explanation.winner.seconds


def test_another_kind_uses_other_techniques_and_is_not_quicker(choice, explanation):
    def techniques(candidate):
        return {name for name in ("tp", "pp", "cp", "ep") if getattr(candidate.plan, name) > 1}

    assert techniques(explanation.other) != techniques(choice.best)
    assert explanation.other.seconds >= explanation.winner.seconds


def test_twice_of_one_thing_is_played_there_and_the_most_gain_comes_first(explanation):
    gains = [each.best.seconds for each in explanation.changes]
    assert gains == sorted(gains)
    faster = {each.name: each.best for each in explanation.changes}["the network's rate"]
    assert faster.cluster.levels[-1].bandwidth == 2 * CLUSTER.levels[-1].bandwidth
    assert faster.seconds == played_seconds(Costs(WORKLOAD, faster.cluster), faster.plan, 64)
    # "at least": a search of the changed machine may find more, and its best is not slower.
    assert Search(WORKLOAD, faster.cluster, 64).best(1).best.seconds <= faster.seconds / (1 - SLACK)


def test_plans_within_the_error_between_two_steps_are_counted_and_the_simplest_is_told(choice, explanation):
    between, best = band_between(CLUSTER), choice.best
    close = best.seconds / between.low
    assert explanation.alike == sum(each.seconds < close for each in choice.candidates[1:])
    simple, plans = explanation.simple, choice.search.shared.known
    assert simple.seconds <= close

    def degrees(plan):
        return sum(getattr(plan, name) > 1 for name in ("tp", "pp", "cp", "ep"))

    fewest = min(degrees(plan) for plan, seconds in plans.items() if seconds <= close)
    assert degrees(simple.plan) == min(fewest, degrees(best.plan))
    wide = dataclasses.replace(explanation, between=dataclasses.replace(between, low=0.5))
    assert "less than 100% apart" in " ".join(wide.sentences())


def test_the_sentences_name_every_degree_that_was_changed(explanation):
    text = " ".join(explanation.sentences())
    assert all(f"{each.degree}=" in text for each in explanation.neighbours)


def test_more_free_memory_never_makes_the_best_slower():
    seconds = [choose(WORKLOAD, CLUSTER, 64, margin=margin).best.seconds for margin in (0.0, 0.3, 0.6)]
    assert seconds == sorted(seconds)


def test_a_bucket_is_small_where_messages_are_free_and_large_where_each_costs():
    plan = SettledPlan(dp=16, microbatch=4, precision="bf16")
    sizes = []
    for latency in (0.0, 1e-4):
        levels = tuple(
            dataclasses.replace(link, latency=latency, setup=latency, packet_latency=0.0, half_size=0.0)
            for link in CLUSTER.levels
        )
        sizes.append(usual_bucket(CLUSTER.replace(levels=levels), plan))
    assert sizes[0] < sizes[1]


def test_money_needs_a_price():
    with pytest.raises(ClusterError, match="no price"):
        choose(WORKLOAD, CLUSTER.replace(price=0.0), 64, objective="money")


def test_an_unknown_objective_is_refused():
    with pytest.raises(ConfigError, match="objective=fame"):
        choose(WORKLOAD, CLUSTER, 64, objective="fame")


def test_what_fits_nowhere_says_what_would():
    with pytest.raises(PlanError, match="does not fit 16 devices") as raised:
        choose(workload_of(shape("gpt3-175b")), CLUSTER, 64)
    assert "of these devices or more" in raised.value.possible


def test_half_and_twice_of_each_size_cost_what_their_plans_cost(choice, explanation):
    costs = Costs(WORKLOAD, CLUSTER)
    assert {each.setting for each in explanation.sizes} == {"microbatch", "bucket"}
    for each in explanation.sizes:
        own = getattr(choice.best.plan, each.setting)
        assert getattr(each.plan, each.setting) in (own // 2, 2 * own)
        assert each.plan.replace(**{each.setting: own}) == choice.best.plan
        ratio = played_seconds(costs, each.plan, 64) / choice.best.seconds
        assert each.slower == pytest.approx(ratio - 1)
        memory = max(rank.peak for rank in memory_of(WORKLOAD, each.plan, 64, CLUSTER))
        assert each.memory == pytest.approx(memory, rel=1e-3)  # stages cut by costs, not by FLOP
        assert each.fits == (each.memory <= explanation.room)


def test_a_size_that_fits_is_told_by_its_pace_and_one_that_does_not_by_its_memory(explanation):
    text = " ".join(explanation.sentences())
    assert "microbatch=" in text
    assert "bucket=" in text
    if any(not each.fits for each in explanation.sizes):
        assert "too much memory" in text
