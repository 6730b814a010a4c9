"""The last touches to the best Plans, and their neighbours: all is played, fits and is legal."""

import pytest

from shoal.predict.planner import Search, choose
from shoal.predict.planner.refine import (
    LEAST_GAIN,
    MOST_SEARCHED,
    SIMPLER,
    neighbours,
    polished,
    simplest,
    with_found_schedule,
)
from shoal.predict.simulate import simulate
from shoal.spec.cluster import Cluster
from shoal.spec.plan import SettledPlan
from shoal.spec.workload import shape, workload_of

WORKLOAD = workload_of(shape("gpt3-1.3b"))
CLUSTER = Cluster.parse("dgx-a100:8")
BATCH = 32


@pytest.fixture(scope="module")
def search():
    return Search(WORKLOAD, CLUSTER, BATCH)


@pytest.fixture(scope="module")
def pipelined(search):
    return search.best(2, lambda degrees: degrees.pp > 1).found


def test_seconds_are_those_of_the_simulation_and_touches_make_none_longer(search, pipelined):
    for before in pipelined:
        after = polished(search, before)
        assert after.seconds <= before.seconds
        assert after.memory.peak <= search.room
        for each in before, after:
            played = simulate(WORKLOAD, CLUSTER, each.plan, BATCH).seconds
            assert each.seconds == pytest.approx(played, rel=1e-6)


def test_a_found_schedule_is_quicker_has_room_and_is_small(search, pipelined):
    found = [(each, with_found_schedule(search, each)) for each in pipelined]
    taken = [(before, after) for before, after in found if after != before]
    assert taken, "no schedule was found that is quicker"
    for before, after in taken:
        assert after.plan.schedule == "search"
        assert after.seconds <= (1 - LEAST_GAIN) * before.seconds
        assert after.memory.peak <= search.room
        assert after.plan.stages * after.plan.microbatches_of(BATCH) <= MOST_SEARCHED


def test_without_a_pipeline_or_without_room_no_schedule_is_looked_for(search, pipelined):
    (alone,) = search.best(1, lambda degrees: degrees.pp == 1).found
    assert with_found_schedule(search, alone) == alone
    full = Search(WORKLOAD, CLUSTER, BATCH, margin=0.9999)
    assert with_found_schedule(full, pipelined[0]) == pipelined[0]


def test_a_simpler_plan_is_taken_if_it_is_as_quick_and_fits(search, pipelined):
    best = pipelined[0]
    taken = simplest(search, best)
    assert taken.seconds <= (1 + SIMPLER) * best.seconds
    assert taken.memory.peak <= search.room


def test_the_choice_is_the_first_of_what_was_played():
    choice = choose(WORKLOAD, CLUSTER, BATCH, limit=3)
    assert [each.seconds for each in choice.candidates] == sorted(each.seconds for each in choice.candidates)
    assert choice.explain().winner is choice.best


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("gpt3-1.3b", "dp=8,shard=zero1,microbatch=2,precision=bf16"),
        ("gpt3-1.3b", "dp=2,tp=2,pp=2,schedule=zb-v,microbatch=2,precision=bf16"),
        ("mixtral-8x7b", "dp=4,cp=2,ep=4,shard=zero3,microbatch=1,precision=bf16"),
    ],
)
def test_a_plan_s_neighbours_are_legal_each_once_and_near(model, text):
    space = Search(workload_of(shape(model)), CLUSTER, BATCH).shared.space
    plan = SettledPlan.parse(text)
    found = list(neighbours(space, plan))
    assert plan not in found
    assert len(set(found)) == len(found) > 20
    assert {each.shard for each in found} > {plan.shard}
    for each in found:
        assert space.is_legal(each)
        each.require_ranks(8)
        assert SettledPlan.of(each, BATCH) == each
        changed = [name for name in ("dp", "tp", "pp", "cp") if getattr(each, name) != getattr(plan, name)]
        assert len(changed) in (0, 2)
        for name in changed:
            assert max(getattr(each, name), getattr(plan, name)) == 2 * min(
                getattr(each, name), getattr(plan, name)
            )
