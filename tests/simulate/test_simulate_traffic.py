"""What a rank exchanges, against what it is played to exchange."""

import pytest

from shoal.predict.cost.collectives.network import algorithm_seconds
from shoal.predict.cost.time.jitter import lognormal_maximum
from shoal.predict.simulate import simulate, traffic_of
from shoal.spec.cluster import Cluster
from shoal.spec.plan import SettledPlan
from shoal.spec.plan.group import Group
from shoal.spec.workload import ModelShape, shape, workload_of

CLUSTER = Cluster.parse("dgx-h100:16")
MODEL = workload_of(ModelShape(layers=8, hidden=512, ffn=2048, heads=8, vocab=4096, seq=256))
EXPERTS = workload_of(shape("mixtral-8x7b").replace(layers=4, seq=512))


@pytest.mark.parametrize(
    ("model", "text", "batch"),
    [
        (MODEL, "dp=4,tp=4,shard=zero3,microbatch=1", 16),
        (MODEL, "dp=4,tp=2,cp=2,shard=zero2,microbatch=2", 16),
        (MODEL, "dp=4,tp=4,tensor=plain,shard=none,microbatch=1", 8),
        (EXPERTS, "dp=16,ep=4,shard=zero1,microbatch=1", 32),
    ],
)
def test_without_a_pipeline_each_exchange_is_counted_as_it_is_played(model, text, batch):
    plan = SettledPlan.parse(text + ",precision=bf16")
    traffic = traffic_of(model, CLUSTER, plan, batch)
    played = simulate(model, CLUSTER, plan, batch).breakdown.collectives
    for operation, figures in played.items():
        ours = [each for each in traffic.exchanges if each.name.partition(":")[0] == operation]
        assert sum(each.bytes * each.times for each in ours) == pytest.approx(figures.bytes)
        assert sum(each.times for each in ours) == figures.count


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved"])
def test_in_a_pipeline_bytes_are_those_that_are_played(schedule):
    virtual = 2 if schedule == "interleaved" else 1
    plan = SettledPlan(
        pp=4, dp=2, tp=2, schedule=schedule, virtual=virtual, shard="zero1", microbatch=1, precision="bf16"
    )
    traffic = traffic_of(MODEL, CLUSTER, plan, 16)
    played = simulate(MODEL, CLUSTER, plan, 16).breakdown.of(traffic.rank).collectives
    for operation in ("all_gather", "reduce_scatter"):
        ours = [each for each in traffic.exchanges if each.name.partition(":")[0] == operation]
        assert sum(each.bytes * each.times for each in ours) == pytest.approx(played[operation].bytes)


def test_the_algorithm_is_the_quickest_and_the_level_joins_all():
    plan = SettledPlan(dp=2, tp=8, shard="none", microbatch=1, precision="bf16")
    for each in traffic_of(MODEL, CLUSTER, plan, 8).exchanges:
        if each.name == "all_reduce:bucket" and each.ranks == 2:
            assert each.level == CLUSTER.levels[1].name
        if each.purpose == "tensor" and each.name.startswith("all_gather"):
            assert each.level == CLUSTER.levels[0].name
            found = algorithm_seconds("all_gather", each.bytes, Group(8), CLUSTER)
            assert each.algorithm == min(found, key=found.__getitem__)


def test_a_rank_alone_exchanges_nothing():
    plan = SettledPlan(microbatch=1, precision="bf16")
    assert traffic_of(MODEL, Cluster.parse("dgx-h100:1"), plan, 2).exchanges == ()


@pytest.mark.parametrize("text", ["dp=16,shard=zero1", "dp=4,pp=4", "dp=4,tp=2,pp=2,shard=zero2"])
def test_jitter_is_straggler_wait_and_lengthens_all_before_the_optimizer(text):
    plan = SettledPlan.parse(text + ",microbatch=1,precision=bf16")
    still = simulate(MODEL, CLUSTER, plan, 32)
    varying = simulate(MODEL, CLUSTER.replace(jitter=0.1), plan, 32)
    added = varying.seconds - still.seconds
    assert added <= (lognormal_maximum(16, 0.1) - 1) * still.seconds
    assert added >= 0.8 * (lognormal_maximum(16, 0.1) - 1) * still.seconds  # the optimizer is short
    before, after = still.breakdown.parts, varying.breakdown.parts
    assert after.straggler_wait - before.straggler_wait == pytest.approx(added, rel=1e-6)
    assert after.compute == pytest.approx(before.compute)
