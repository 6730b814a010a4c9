"""Days, money, failures and checkpoints of many steps, against formulas."""

import math

import pytest

from shoal.cluster import Cluster
from shoal.cost import Costs
from shoal.cost.outlook.long_run import long_run
from shoal.cost.time import straggler_share
from shoal.cost.time.maximum import lognormal_maximum
from shoal.errors import ClusterError, ConfigError
from shoal.plan import SettledPlan
from shoal.simulate import played_parts, played_seconds
from shoal.workload import shape, workload_of

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


def test_without_jitter_nobody_is_late():
    assert straggler_share(CLUSTER) == 0


@pytest.mark.parametrize("jitter", [-0.1, 1.0])
def test_a_jitter_that_cannot_be_is_refused(jitter):
    with pytest.raises(ClusterError, match="jitter"):
        CLUSTER.replace(jitter=jitter)
