"""Steps of ranks that share cores."""

import pytest

from shoal.predict.cost.time.step import crowded_seconds
from shoal.predict.simulate import simulate
from shoal.spec.cluster import Cluster
from shoal.spec.plan import Plan, SettledPlan
from shoal.spec.timeline import Kind, explain
from shoal.spec.workload import ModelShape, workload_of

WORKLOAD = workload_of(ModelShape(layers=8, hidden=64, ffn=256, heads=4, vocab=64, seq=64))
BATCH = 8


def on_cores(cores, plan):
    return simulate(WORKLOAD, Cluster.preset("laptop").with_cores(cores).with_devices(4), plan, BATCH)


def with_half_a_core_each(plan):
    """As if no rank lent its part of a core."""
    shared = Cluster.preset("laptop").with_cores(2).with_devices(4)
    return simulate(WORKLOAD, shared.replace(cores=4), plan, BATCH)


def test_a_rank_that_waits_in_a_pipeline_lends_its_core():
    plan = SettledPlan.parse("pp=4,microbatch=2")
    shared, alone = on_cores(2, plan), with_half_a_core_each(plan)
    parts = alone.breakdown.parts
    assert parts.wall - parts.bubble - parts.straggler_wait < shared.seconds < alone.seconds
    spans = [span for span in alone.timeline if span.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER)]
    busy = [(span.start, span.stop) for span in spans]
    assert shared.seconds == pytest.approx(crowded_seconds(alone.seconds, busy, 4, 2))


def test_ranks_that_never_wait_for_each_other_lend_nothing():
    plan = Plan.parse("dp=4")
    assert on_cores(2, plan).seconds == pytest.approx(with_half_a_core_each(plan).seconds)


@pytest.mark.parametrize("text", ["pp=4,microbatch=2", "dp=4", "dp=2,pp=2,microbatch=1"])
def test_the_timeline_and_the_breakdown_take_as_long_as_the_step(text):
    simulation = on_cores(2, Plan.parse(text))
    for breakdown in (explain(simulation.timeline), simulation.breakdown):
        assert max(rank.parts.wall for rank in breakdown.ranks) == pytest.approx(simulation.seconds)


def test_a_core_for_each_rank_is_quicker_than_half_a_core():
    plan = SettledPlan.parse("pp=4,microbatch=2")
    assert on_cores(4, plan).seconds < on_cores(2, plan).seconds
