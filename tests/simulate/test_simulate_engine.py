"""Steps are played equally with a Journal and without, and passes alone as steps that exchange nothing."""

import random
from dataclasses import replace

import pytest
from random_plans import ORDERS, random_cluster, random_plan

from shoal.predict.cost import Costs
from shoal.predict.cost.time import straggler_share
from shoal.predict.simulate.engine import play_steps
from shoal.predict.simulate.journal import Journal
from shoal.predict.simulate.programs import links_of, rank_programs, stage_programs
from shoal.spec.plan.schedules import FOUND, NAMES, Times, common_order_of, make, play_in_order, search
from shoal.spec.workload import ModelShape, workload_of

MODEL = workload_of(ModelShape(layers=16, hidden=2048, ffn=8192, heads=16, vocab=32000, seq=2048, tied=True))
BATCH = 96
ROUNDING = 1e-11
"""With a Journal all pieces of each action are summed, and without their sum from the time before."""


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
def test_steps_are_played_equally_with_a_journal_and_without(schedule):
    chance = random.Random(schedule)
    for _ in range(6):
        cluster = random_cluster(chance, 8)
        plan, table = drawn(chance, schedule)
        costs, order = Costs(MODEL, cluster), common_order_of(table)
        stages = stage_programs(plan, costs, table.microbatches)
        programs = rank_programs(plan, costs, table, stages)
        links, lateness = links_of(plan, costs, order.pairs), straggler_share(plan, cluster)
        play, noted = (
            play_steps(order, programs, links, lateness=lateness, steps=2, journal=journal)
            for journal in (None, Journal())
        )
        for starts, others in zip(play.starts, noted.starts, strict=True):
            assert starts == pytest.approx(others, rel=ROUNDING)
        assert play.end == pytest.approx(noted.end, rel=ROUNDING)
        for one, other in zip(play.waits, noted.waits, strict=True):
            assert one == pytest.approx(other, rel=ROUNDING, abs=ROUNDING * play.end)


@pytest.mark.parametrize("schedule", [*NAMES, FOUND])
def test_passes_alone_take_as_long_as_ranks_that_exchange_nothing(schedule):
    chance = random.Random(schedule)
    for _ in range(6):
        cluster = random_cluster(chance, 8)
        plan, table = drawn(chance, schedule)
        costs = Costs(MODEL, cluster)
        stages = stage_programs(plan, costs, table.microbatches, exchanges=False)
        programs = [
            replace(each, finish=(), norm=None, merge=None, update=0.0)
            for each in rank_programs(plan, costs, table, stages)
        ]
        order = common_order_of(table)
        links = links_of(plan, costs, order.pairs)
        lateness = straggler_share(plan, cluster)
        play = play_steps(order, programs, links, lateness=lateness)
        slots = [
            stages[slot.stage].passage(slot.work, is_first=slot.is_first, is_last=slot.is_last).seconds
            for slot in order.slots
        ]
        seconds = [links[pair].seconds for pair in order.pairs]
        alone = play_in_order(order, slots, seconds)
        assert max(alone.stops) * (1 + lateness) == pytest.approx(play.end, rel=ROUNDING)
        for starts, others in zip(alone.starts, play.starts, strict=True):
            assert starts == pytest.approx(others, rel=ROUNDING)
