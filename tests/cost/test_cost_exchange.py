"""What data parallelism leaves exposed: who exchanges what, and the bound against played steps."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.predict.cost.collectives.network import collective_seconds
from shoal.predict.cost.time.buckets import buckets_of, families_of, parameters_on_rank
from shoal.predict.cost.time.step import Costs
from shoal.predict.simulate import played_parts, played_seconds, simulate
from shoal.spec.cluster import Cluster, Device, Level
from shoal.spec.plan import Mesh, SettledPlan, divisors
from shoal.spec.plan.group import Group
from shoal.spec.workload import ModelShape, workload_of

SHAPE = ModelShape(layers=16, hidden=1024, ffn=4096, heads=16, vocab=8192, seq=1024)
DENSE = workload_of(SHAPE)
EXPERTS = workload_of(SHAPE.replace(experts=8, experts_per_token=2, expert_ffn=4096))


def cluster_of(devices: int, rate: float = 50e9, latency: float = 0.0) -> Cluster:
    device = Device(
        name="device", memory=8e10, bandwidth=2e12, peak={"bf16": 3e14, "fp32": 2e13}, units=108,
        contention=0.3, dispatch=0.0, launch=0.0,
    )  # fmt: skip
    level = Level(name="switch", devices=devices, bandwidth=rate, share=1.0, latency=latency)
    return Cluster(name="test", device=device, levels=(level,))


@st.composite
def meshes(draw):
    shard = draw(st.sampled_from(("none", "zero1", "zero3-once", "zero3")))
    dp, cp, tp = (draw(st.sampled_from((1, 2, 4))) for _ in range(3))
    replicate = draw(st.sampled_from(divisors(dp))) if shard != "none" else 1
    ep = draw(st.sampled_from(divisors(dp // replicate * cp)))
    return SettledPlan(dp=dp, cp=cp, tp=tp, ep=ep, replicate=replicate, shard=shard, microbatch=1)


@given(meshes())
def test_each_family_is_exchanged_by_the_ranks_that_have_the_same(plan):
    """By what rank 0 of the mesh has of a parameter: its part of tp, or its experts."""
    mesh = Mesh.of(plan)
    every = range(plan.ranks)

    def part(kind, rank):
        if kind == "divided":
            return mesh.coordinate(rank, "tp")
        return mesh.coordinate(rank, "dp", "cp") % plan.ep if kind == "experts" else 0

    for family in families_of(plan):
        kind = family.kinds[0] if plan.tp > 1 or family.kinds == ("experts",) else "divided"
        same = {rank for rank in every if part(kind, rank) == part(kind, 0)}
        shards, replicas = family.shards.ranks(0), family.replicas.ranks(0)
        together = {first + other for first in shards for other in replicas}
        if plan.shard == "none" or kind == "divided" or plan.tp == 1:
            assert together == same
        assert len(shards) * len(replicas) == len(same)
    assert families_of(plan)[0].shards.size == (1 if plan.shard == "none" else plan.shards * plan.cp)


@given(meshes(), st.sampled_from((1 << 16, 1 << 20, 1 << 25)), st.sampled_from((DENSE, EXPERTS)))
@settings(deadline=None)
def test_every_parameter_is_in_one_bucket_and_small_ones_share_theirs(plan, size, workload):
    plan = plan.replace(bucket=size)
    blocks = workload.pieces
    buckets = buckets_of(blocks, (0, len(blocks) - 1), plan, 2)
    held = sum(parameters_on_rank(block.parameters, plan.tp, plan.ep).total for block in blocks)
    assert sum(bucket.parameters * bucket.number for bucket in buckets) == pytest.approx(held)
    if not plan.sharding.cuts_weights:
        assert all(2 * bucket.parameters <= size + 1e-6 for bucket in buckets)
    assert [bucket.first for bucket in buckets] == sorted((each.first for each in buckets), reverse=True)


def test_experts_gradients_are_exchanged_by_fewer_ranks():
    plan = SettledPlan(dp=8, ep=8, microbatch=1, bucket=1 << 40, precision="bf16")
    assert families_of(plan)[1].replicas == Group(1)
    with_one, with_all = (
        simulate(EXPERTS, cluster_of(8), plan.replace(ep=ep), 8).breakdown.collectives["all_reduce"].bytes
        for ep in (8, 1)
    )
    experts = sum(block.parameters.experts for block in EXPERTS.pieces)
    assert with_one == pytest.approx(4 * (EXPERTS.parameters - experts), rel=1e-6)
    assert with_all == pytest.approx(4 * EXPERTS.parameters, rel=1e-6)


def test_an_expert_s_state_is_owned_by_fewer_ranks_than_others():
    costs = Costs(EXPERTS, cluster_of(8))
    held = parameters_on_rank(dataclasses.replace(EXPERTS.layers[0].parameters, whole=0, divided=0), 1, 8)
    sharded, whole = (
        costs.update(SettledPlan(dp=8, ep=8, shard=shard, microbatch=1), held) for shard in ("zero1", "none")
    )
    assert sharded == pytest.approx(whole)


def assert_near_below(costs, plan, batch, share):
    """No played step is shorter than the bound, and none longer by more than this share."""
    played, least = played_seconds(costs, plan, batch), costs.least(plan, batch)
    assert (1 - share) * played <= least <= played * (1 + 1e-9)


PLANS = st.builds(
    lambda shard, dp, bucket, microbatch: SettledPlan(
        dp=dp, shard=shard, bucket=bucket, microbatch=microbatch, precision="bf16"
    ),
    st.sampled_from(("none", "zero1", "zero2", "zero3", "zero3-once")),
    st.sampled_from((2, 8)),
    st.sampled_from((1 << 22, 25 << 20, 1 << 30)),
    st.sampled_from((1, 4)),
)


@given(PLANS, st.integers(1, 3), st.sampled_from((2e9, 2e10, 2e11)), st.sampled_from((0.0, 2e-5)))
@settings(deadline=None, max_examples=60)
def test_the_bound_is_nearly_the_played_step_with_buckets_of_any_size(plan, count, rate, latency):
    cluster, batch = cluster_of(plan.ranks, rate, latency), plan.dp * plan.microbatch * count
    # Buckets in between the first and the last may have to wait for compute: at most a few of many layers.
    assert_near_below(Costs(DENSE, cluster), plan, batch, 0.03)


@given(PLANS, st.integers(1, 3), st.sampled_from((1, 2)), st.sampled_from((2e9, 2e10)))
@settings(deadline=None, max_examples=30)
def test_the_bound_is_nearly_the_played_step_where_a_network_joins_nodes(plan, count, replicate, rate):
    plan = plan if plan.shard == "none" else plan.replace(replicate=replicate)
    cluster, batch = cluster_of(2, 1e11), plan.dp * plan.microbatch * count
    network = Level(name="network", devices=plan.ranks, bandwidth=rate, share=1.0, latency=0.0)
    cluster = cluster.replace(levels=(*cluster.levels, network))
    # As above; and what travels at several rates loads the device by their mean.
    assert_near_below(Costs(DENSE, cluster), plan, batch, 0.04)


@given(
    st.sampled_from(("none", "zero1", "zero2", "zero3", "zero3-once")),
    st.sampled_from(((2, 1), (4, 1), (4, 2))),
    st.sampled_from((5e9, 5e10)),
)
@settings(deadline=None, max_examples=30)
def test_with_a_pipeline_the_bound_is_near_the_played_step(shard, stages, rate):
    pp, virtual = stages
    schedule = "interleaved" if virtual > 1 else "1f1b"
    plan = SettledPlan(
        dp=4, pp=pp, shard=shard, schedule=schedule, virtual=virtual, microbatch=2, split="count",
        bucket=1 << 26, precision="bf16",
    )  # fmt: skip
    cluster, batch = cluster_of(plan.ranks, rate), 2 * 4 * 2 * pp
    # Waits for messages between those that fill and drain the pipeline are not in the bound.
    assert_near_below(Costs(DENSE, cluster), plan, batch, 0.1)


def test_the_last_bucket_is_never_hidden():
    cluster = cluster_of(4, rate=1e12)
    plan = SettledPlan(dp=4, microbatch=8, bucket=1 << 40, precision="bf16")
    last = collective_seconds("all_reduce", 4.0 * DENSE.embedding.parameters.total, Group(4), cluster)
    all_of_it = collective_seconds("all_reduce", 4.0 * DENSE.parameters, Group(4), cluster)
    exposed = played_parts(Costs(DENSE, cluster), plan, 32)["data"]
    assert last <= exposed <= all_of_it


def test_a_pipeline_s_first_stage_exchanges_after_its_last_backward():
    cluster = cluster_of(8)
    plan = SettledPlan(dp=4, pp=2, microbatch=1, split="count", bucket=1 << 40, precision="bf16")
    costs = Costs(DENSE, cluster)
    first = costs.stages(plan, 8)[0].parameters.total
    blocks = first - DENSE.embedding.parameters.total
    expected = sum(
        collective_seconds("all_reduce", 4.0 * count, Group(4), cluster)
        for count in (blocks, DENSE.embedding.parameters.total)
    )
    last = simulate(DENSE, cluster, plan, 32).played.makespan  # of all forwards and backwards
    ends = costs.norm(plan) + costs.update_of(plan, 8)
    assert played_seconds(costs, plan, 32) == pytest.approx(last + expected + ends)
