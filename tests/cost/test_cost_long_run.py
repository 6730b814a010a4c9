"""Days, money, failures and checkpoints of many steps, against formulas."""

import math
import random

import pytest

from shoal.errors import ClusterError, ConfigError
from shoal.predict.cost import Costs
from shoal.predict.cost.outlook.long_run import long_run
from shoal.predict.cost.time import straggler_share
from shoal.predict.cost.time.jitter import lognormal_maximum
from shoal.predict.simulate import played_parts, played_seconds
from shoal.spec.cluster import Cluster
from shoal.spec.plan import Plan, SettledPlan
from shoal.spec.workload import shape, workload_of

CLUSTER = Cluster.parse("dgx-h100:64")
MODEL = workload_of(shape("llama3-70b"))


def test_days_failures_and_dollars_are_those_of_the_formulas():
    run = long_run(MODEL, CLUSTER, 100.0, 1e6, steps=10_000)
    between = 3600 / (64 * CLUSTER.failures)
    save = 12 * MODEL.parameters / (8 * 1e9)  # eight nodes write 1 GB/s each
    trained = run.goodput.interval * 100.0
    assert run.goodput.interval == round(math.sqrt(2 * between * save) / 100.0)
    seconds = between * math.exp((300 + save) / between) * math.expm1((trained + save) / between)
    assert run.days == pytest.approx(10_000 * 100 / trained * seconds / 86_400)
    assert run.failures == pytest.approx(run.days * 86_400 / between)
    assert run.dollars == pytest.approx(run.days * 24 * 64 * CLUSTER.price)


def test_tokens_are_seen_in_whole_steps():
    run = long_run(MODEL, CLUSTER, 1.0, 1000.0, tokens=2500)
    assert (run.steps, run.tokens) == (3, 3000)


def test_what_a_cluster_does_not_tell_is_zero():
    run = long_run(MODEL, CLUSTER.replace(price=0.0, failures=0.0), 1.0, 1e6, steps=86_400)
    assert (run.dollars, run.failures, run.days) == (0.0, 0.0, pytest.approx(1.0))


def test_quicker_storage_saves_more_often_and_loses_less():
    slow, quick = (long_run(MODEL, CLUSTER, 1.0, 1e6, steps=10, storage=rate) for rate in (1e8, 1e10))
    assert quick.save == pytest.approx(slow.save / 100)
    assert quick.goodput.interval < slow.goodput.interval
    assert quick.goodput.share > slow.goodput.share


@pytest.mark.parametrize("given", [{"steps": 0}, {"tokens": -1.0}, {"steps": 1, "storage": 0.0}])
def test_numbers_that_cannot_be_are_refused(given):
    with pytest.raises(ConfigError, match="is not allowed"):
        long_run(MODEL, CLUSTER, 1.0, 1e6, **given)


def test_all_ranks_wait_for_the_slowest_of_all_that_comes_before_the_optimizer():
    plan = SettledPlan(dp=8, tp=8, shard="zero1", microbatch=1, precision="bf16")
    steady, varying = (Costs(MODEL, CLUSTER.replace(jitter=jitter)) for jitter in (0.0, 0.05))
    before = played_seconds(steady, plan, 64) - steady.update_of(plan, 8) - steady.norm(plan)
    late = (lognormal_maximum(64, 0.05) - 1) * before
    assert played_parts(varying, plan, 64)["control"] == pytest.approx(late + steady.norm(plan))
    longer = played_seconds(varying, plan, 64) - played_seconds(steady, plan, 64)
    assert longer == pytest.approx(late)


@pytest.mark.parametrize(
    ("text", "together", "between", "ahead"),
    [
        ("exchange=bucketed", 16, 1, 0),
        ("exchange=local,every=9", 1, 9, 0),
        ("replicate=4,shard=zero2,exchange=local,every=16", 4, 16, 0),
        ("replicate=4,shard=zero2,exchange=local,every=16,fragments=4", 4, 4, 0),
        ("replicate=4,shard=zero2,exchange=server", 4, 1, 0),
        ("exchange=server,staleness=2", 1, 1, 2),
    ],
)
def test_workers_wait_for_the_slowest_as_in_a_random_training(text, together, between, ahead):
    """Ranks of a worker meet in each step, workers in one of so many, or if one is too far ahead."""
    jitter, steps, chance = 0.3, 900, random.Random(0)
    sigma = math.sqrt(math.log1p(jitter**2))
    ends = [[0.0] * (16 // together)]
    for step in range(steps):
        took = [max(chance.lognormvariate(-(sigma**2) / 2, sigma) for _ in range(together)) for _ in ends[0]]
        is_met = step % between == 0 and step >= ahead
        gate = max(ends[step - ahead]) if is_met else 0.0
        ends.append([max(gate, end) + seconds for end, seconds in zip(ends[-1], took, strict=True)])
    plan = SettledPlan.of(Plan.parse(f"dp=16,microbatch=1,{text}"), 16)
    found = straggler_share(plan, Cluster.parse("dgx-h100:16").replace(jitter=jitter))
    played = max(ends[-1]) / steps - 1
    if ahead:
        assert played < found < 0.5 * (lognormal_maximum(16, jitter) - 1)
    else:
        assert found == pytest.approx(played, rel=0.06)


def test_rare_merges_take_the_wait_out_of_the_bound_and_of_the_played_step():
    """What is left is the wait within workers."""
    plan = SettledPlan.of(
        Plan.parse("dp=64,replicate=8,shard=zero1,microbatch=1,exchange=local,every=10000"), 64
    )
    steady, varying = (Costs(MODEL, CLUSTER.replace(jitter=jitter)) for jitter in (0.0, 0.05))
    for predicted in (played_seconds, Costs.least):
        still, late = (
            predicted(costs, plan, 64) - costs.update_of(plan, 1) - costs.norm(plan)
            for costs in (steady, varying)
        )
        assert late / still == pytest.approx(lognormal_maximum(8, 0.05), rel=1e-3)


def test_without_jitter_nobody_is_late():
    assert straggler_share(SettledPlan(dp=64, microbatch=1), CLUSTER) == 0


@pytest.mark.parametrize("jitter", [-0.1, 1.0])
def test_a_jitter_that_cannot_be_is_refused(jitter):
    with pytest.raises(ClusterError, match="jitter"):
        CLUSTER.replace(jitter=jitter)
