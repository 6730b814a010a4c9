"""The player of a CommonOrder gives every time that the event engine gives."""

import random
from dataclasses import replace

import pytest
from random_plans import ORDERS, random_cluster, random_plan

from shoal.cost import Costs
from shoal.cost.time import straggler_share
from shoal.errors import PlanError
from shoal.plan.schedules import FOUND, NAMES, Action, Times, make, search
from shoal.plan.schedules.received import received_makespan
from shoal.simulate.common_order import common_order_of
from shoal.simulate.course import course_of
from shoal.simulate.engine import play_steps
from shoal.simulate.in_order import passes_in_order, play_in_order
from shoal.simulate.journal import Journal
from shoal.simulate.programs import alike_programs, links_of, rank_programs
from shoal.workload import ModelShape, workload_of

MODEL = workload_of(ModelShape(layers=16, hidden=2048, ffn=8192, heads=16, vocab=32000, seq=2048, tied=True))
BATCH = 96
ROUNDING = 1e-11
"""The engine sums all pieces of each action, and the player their sum from the time before."""


def drawn(chance, schedule):
    """A Plan with this schedule and a table of it; a searched table is that for random times."""
    while True:
        plan = random_plan(chance, MODEL, 8, BATCH, pipelines=True, orders=ORDERS)
        count = plan.microbatches_of(BATCH)
        if schedule == FOUND and plan.schedule == "1f1b" and count <= 12:
            times = [tuple(chance.randint(1, 5) for _ in range(plan.stages)) for _ in range(3)]
            sends = (0.5,) * (plan.stages - 1)
            limit = chance.randint(1, 2 * plan.stages)
            table = search(Times(*times, sends), plan.pp, 1, count, limit, plan.placement)
            return plan.replace(schedule=FOUND), table
        if plan.schedule == schedule and count <= 48:
            return plan, make(schedule, plan.pp, plan.stages // plan.pp, count)


@pytest.mark.parametrize("schedule", [*NAMES, FOUND])
def test_the_player_of_a_common_order_gives_the_times_of_the_engine(schedule):
    chance = random.Random(schedule)
    for _ in range(6):
        cluster = random_cluster(chance, 8)
        plan, table = drawn(chance, schedule)
        costs = Costs(MODEL, cluster)
        programs = [
            rank_programs(plan, costs, table, alike_programs(plan, costs, table.microbatches))
            for _ in range(2)
        ]
        order, course = common_order_of(table), course_of(table)
        assert set(order.pairs) == course.pairs
        links = links_of(plan, costs, course.pairs)
        lateness = straggler_share(plan, cluster)
        play = play_in_order(order, programs[0], links, lateness=lateness)
        engine = play_steps(course, programs[1], links, lateness=lateness, journal=Journal())
        for starts, row in zip(play.starts, engine.actions[0], strict=True):
            assert starts == pytest.approx([start for start, _ in row], rel=ROUNDING)
        assert play.end == pytest.approx(engine.end, rel=ROUNDING)
        for one, other in zip(play.waits, engine.waits, strict=True):
            assert one == pytest.approx(other, rel=ROUNDING, abs=ROUNDING * play.end)


@pytest.mark.parametrize("schedule", [*NAMES, FOUND])
def test_passes_alone_take_as_long_as_ranks_that_exchange_nothing(schedule):
    chance = random.Random(schedule)
    for _ in range(6):
        cluster = random_cluster(chance, 8)
        plan, table = drawn(chance, schedule)
        costs = Costs(MODEL, cluster)
        stages = alike_programs(plan, costs, table.microbatches, exchanges=False)
        programs = [
            replace(each, finish=(), norm=None, merge=None, update=0.0)
            for each in rank_programs(plan, costs, table, stages)
        ]
        order = common_order_of(table)
        links = links_of(plan, costs, order.pairs)
        lateness = straggler_share(plan, cluster)
        play = play_in_order(order, programs, links, lateness=lateness)
        slots = [
            stages[slot.stage].passage(slot.work, is_first=slot.is_first, is_last=slot.is_last).seconds
            for slot in order.slots
        ]
        seconds = [links[pair].seconds for pair in order.pairs]
        alone = passes_in_order(order, slots, seconds, lateness=lateness)
        assert alone.end == pytest.approx(play.end, rel=ROUNDING)
        for starts, others in zip(alone.starts, play.starts, strict=True):
            assert starts == pytest.approx(others, rel=ROUNDING)


@pytest.mark.parametrize("schedule", [*NAMES, FOUND])
def test_the_makespan_as_ranks_receive_is_that_of_played_passes(schedule):
    chance = random.Random(schedule)
    for _ in range(6):
        _, table = drawn(chance, schedule)
        forward, input, weight = (tuple(chance.uniform(1, 2) for _ in range(table.stages)) for _ in range(3))
        send = chance.uniform(0, 2)
        times = Times(forward, input, weight, (send,) * (table.stages - 1))
        order = common_order_of(table)
        slots = [times.of(Action(slot.work, slot.stage, 0)) for slot in order.slots]
        played = passes_in_order(order, slots, [send] * len(order.pairs), lateness=0.0)
        assert received_makespan(table, times) == pytest.approx(played.end, rel=ROUNDING)


def test_a_table_that_can_never_end_has_no_common_order():
    table = make("1f1b", 2, 1, 2)
    first, second = table.table
    with pytest.raises(PlanError, match="deadlocks"):
        common_order_of(replace(table, table=(first, second[::-1])))
