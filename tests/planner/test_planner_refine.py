"""The best Plans played: their seconds are the simulator's, and found schedules are kept to memory."""

from dataclasses import replace

import pytest

from shoal.cluster import Cluster
from shoal.planner import Search, choose
from shoal.planner.refine import MOST_SEARCHED, refined, with_found_schedule
from shoal.simulate import simulate
from shoal.workload import shape, workload_of

WORKLOAD = workload_of(shape("gpt3-1.3b"))
CLUSTER = Cluster.parse("dgx-a100:8")


def by_seconds(candidate):
    return candidate.seconds


@pytest.fixture(scope="module")
def search():
    return Search(WORKLOAD, CLUSTER, 32)


@pytest.fixture(scope="module")
def pipelined(search):
    return search.best(2, lambda degrees: degrees.pp > 1).candidates


def test_small_tables_are_played_and_put_in_the_order_of_that(pipelined):
    found = refined(pipelined, by_seconds)
    assert [each.seconds for each in found] == sorted(
        simulate(WORKLOAD, CLUSTER, each.plan, 32).seconds for each in pipelined
    )
    assert {each.source for each in found} == {"simulated"}
    assert [each.in_closed_form.seconds for each in found] == [each.cost.seconds for each in found]


def test_large_tables_keep_the_closed_form(pipelined):
    best = replace(pipelined[0], plan=pipelined[0].plan.replace(microbatch=1), batch=1 << 14)
    (found,) = refined([best], by_seconds)
    assert found == best
    assert found.source == "in closed form"


def test_a_found_schedule_is_quicker_when_played_has_room_and_is_small(search, pipelined):
    played = refined(pipelined, by_seconds)
    for each in with_found_schedule(search, played):
        if each.plan.schedule == "search":
            assert each.seconds < played[0].seconds
            assert each.seconds == simulate(WORKLOAD, CLUSTER, each.plan, 32).seconds
            assert each.memory.peak <= search.room
            assert each.plan.stages * 32 // each.plan.dp // each.plan.microbatch <= MOST_SEARCHED
            break
    else:
        pytest.fail("no schedule was found that is quicker")


def test_without_a_pipeline_or_without_room_no_schedule_is_looked_for(search, pipelined):
    alone = refined(search.best(1, lambda degrees: degrees.pp == 1).candidates, by_seconds)
    assert with_found_schedule(search, alone) == alone
    full = Search(WORKLOAD, CLUSTER, 32, margin=0.9999)
    played = refined(pipelined, by_seconds)
    assert with_found_schedule(full, played) == played


def test_the_choice_is_the_first_of_what_was_played():
    choice = choose(WORKLOAD, CLUSTER, 32, limit=3)
    assert choice.best.seconds == min(each.seconds for each in choice.candidates)
    assert choice.explain().winner.seconds == choice.best.cost.seconds
