"""Simulated steps, against schedules played without communication and against lower bounds on a step."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import ClusterError, PlanError
from shoal.predict.cost.collectives.network import collective_seconds
from shoal.predict.cost.layout import Layout
from shoal.predict.cost.time.step import Costs
from shoal.predict.simulate import simulate
from shoal.spec.cluster import Cluster, Device, Level
from shoal.spec.plan import Plan, SettledPlan
from shoal.spec.plan.group import Group
from shoal.spec.plan.schedules import NAMES, play
from shoal.spec.timeline import Kind, Lane
from shoal.spec.workload import ModelShape, Workload, workload_of

ROUNDING = 1e-9
"""Sums in another order differ by less, relatively."""


def cluster_of(devices: int, *, contention: float = 0.2, rate: float = 50e9, latency: float = 0.0) -> Cluster:
    """One node whose links have no smallest size at which they are quick."""
    device = Device(
        name="device", memory=8e10, bandwidth=2e12, peak={"bf16": 3e14, "fp32": 2e13}, units=108,
        contention=contention, dispatch=0.0, launch=0.0,
    )  # fmt: skip
    level = Level(name="switch", devices=devices, bandwidth=rate, share=1.0, latency=latency)
    return Cluster(name="test", device=device, levels=(level,))


def workload(layers: int = 8, *, vocab: int = 8192, tied: bool = False) -> Workload:
    shape = ModelShape(layers=layers, hidden=1024, ffn=4096, heads=16, vocab=vocab, seq=1024, tied=tied)
    return workload_of(shape)


FREE = {"rate": 1e30}
"""Links on which communication takes no time that floats tell."""


def plans_of_pipelines() -> st.SearchStrategy[Plan]:
    @st.composite
    def plan(draw: st.DrawFn) -> Plan:
        name = draw(st.sampled_from(NAMES))
        pp = draw(st.sampled_from((2, 3, 4)))
        virtual = {"interleaved": 2, "looped-bfs": 2, "zb-v": 2, "dualpipe-v": 2}.get(name, 1)
        return SettledPlan(
            pp=pp,
            schedule=name,
            virtual=virtual,
            microbatch=1,
            split=draw(st.sampled_from(("cost", "count"))),
            precision="bf16",
        )

    return plan()


@given(plans_of_pipelines(), st.integers(2, 4))
@settings(deadline=None, max_examples=40)
def test_with_free_communication_a_pipeline_is_played_as_its_schedule(plan, rounds):
    simulation = simulate(workload(10), cluster_of(plan.pp, **FREE), plan, rounds * plan.pp)
    played = play(simulation.played.schedule, simulation.played.times)
    for ours, theirs in zip(simulation.played.starts, played.starts, strict=True):
        assert ours == pytest.approx(theirs, rel=ROUNDING, abs=1e-12)
    expected = played.makespan + _optimizer_seconds(simulation)
    assert simulation.seconds == pytest.approx(expected, rel=ROUNDING)


def _optimizer_seconds(simulation) -> float:
    """Of the rank whose optimizer takes longest, once all gradients are there."""
    costs = Costs(simulation.workload, simulation.cluster)
    plan = simulation.plan
    count = simulation.batch // plan.dp // plan.microbatch
    return max(costs.update(plan, stage.parameters) for stage in costs.stages(plan, count))


@given(
    st.sampled_from(("gpipe", "1f1b")),
    st.sampled_from((2, 4)),
    st.integers(4, 12),
    st.sampled_from(("none", "full")),
)
@settings(deadline=None, max_examples=20)
def test_equal_stages_take_as_long_as_the_bound_up_to_sends(name, pp, count, recompute):
    # Of so few tokens the embedding and the end weigh little: they would make stages unequal.
    model = workload(8 * pp, vocab=64)
    plan = SettledPlan(
        pp=pp, schedule=name, microbatch=1, split="count", recompute=recompute, precision="bf16"
    )
    cluster = cluster_of(pp)
    simulated = simulate(model, cluster, plan, count)
    costs = Costs(model, cluster)
    least, send = costs.least(plan, count), costs.send(plan, 0, 1)
    assert least <= simulated.seconds * (1 + ROUNDING)
    assert simulated.seconds <= least + send * 2 * (count + pp)


SHARDED = st.sampled_from(("none", "zero1", "zero2", "zero3", "zero3-once"))


@given(SHARDED, st.sampled_from((2, 4, 8)), st.integers(1, 3), st.sampled_from((1, 2)))
@settings(deadline=None, max_examples=40)
def test_without_a_pipeline_a_step_takes_nearly_its_bound(shard, dp, count, tp):
    model = workload(24, vocab=512)
    cluster = cluster_of(dp * tp, rate=100e9)
    plan = SettledPlan(dp=dp, tp=tp, shard=shard, microbatch=4, bucket=1 << 22, precision="bf16")
    simulated = simulate(model, cluster, plan, 4 * dp * count)
    least = Costs(model, cluster).least(plan, simulated.batch)
    # What runs beside compute may run beside communication within blocks, which it does not slow: the bound
    # takes that as done wherever it can be.
    assert 0.95 * simulated.seconds <= least <= simulated.seconds * (1 + ROUNDING)


def test_one_device_takes_the_sum_of_its_operations():
    model, cluster = workload(), cluster_of(1)
    plan = SettledPlan(microbatch=2, precision="bf16")
    simulated = simulate(model, cluster, plan, 6)
    costs = Costs(model, cluster)
    blocks = [costs.block(piece, Layout.of(plan)) for piece in model.pieces]
    expected = 3 * sum(each.forward + each.backward for each in blocks)
    assert simulated.seconds == pytest.approx(expected + _optimizer_seconds(simulated), rel=ROUNDING)


@given(st.floats(0, 0.9), st.floats(1e9, 1e12))
@settings(deadline=None, max_examples=30)
def test_hidden_communication_costs_its_contention_and_no_more_than_if_it_were_exposed(contention, rate):
    model = workload()
    plan = SettledPlan(dp=4, microbatch=1, bucket=1 << 40, precision="bf16")
    alone = simulate(model, cluster_of(4, contention=contention, **FREE), plan, 4)
    cluster = cluster_of(4, contention=contention, rate=rate)
    seconds = simulate(model, cluster, plan, 4).seconds - alone.seconds
    moved = sum(collective_seconds("all_reduce", 4 * piece, Group(4), cluster) for piece in _buckets(model))
    assert contention * (moved - _last(model, cluster)) - 1e-12 <= seconds * (1 + ROUNDING)
    assert seconds <= moved * (1 + ROUNDING)


@pytest.mark.parametrize("shard", ["none", "zero3"])
@pytest.mark.parametrize("part", [0.05, 0.5, 1.0])
def test_a_slower_network_slows_compute_by_as_much_less_in_proportion(part, shard):
    """One device in each node: as on one level of such links, with so much less contention."""
    model, rate = workload(), 1e11
    plan = SettledPlan(dp=4, shard=shard, microbatch=2, precision="bf16")
    network = cluster_of(4, contention=0.6 * part, rate=part * rate)
    inside = dataclasses.replace(network.levels[0], name="inside", devices=1, bandwidth=rate)
    nodes = cluster_of(4, contention=0.6).replace(levels=(inside, *network.levels))
    assert simulate(model, nodes, plan, 16).seconds == pytest.approx(
        simulate(model, network, plan, 16).seconds
    )


def _buckets(model) -> list[int]:
    """Parameters of the end, of all layers and of the embedding: one bucket each where they are large."""
    layers = sum(layer.parameters.total for layer in model.layers)
    return [model.end.parameters.total, layers, model.embedding.parameters.total]


def _last(model, cluster) -> float:
    """The bucket that backward is not there to hide."""
    last = model.embedding.parameters.total
    return collective_seconds("all_reduce", 4 * last, Group(4), cluster)


def test_naive_exchange_is_never_quicker_than_buckets():
    model, cluster = workload(), cluster_of(4, latency=1e-5)
    bucketed = simulate(model, cluster, SettledPlan(dp=4, microbatch=1), 4)
    naive = simulate(model, cluster, SettledPlan(dp=4, microbatch=1, exchange="naive"), 4)
    assert naive.seconds > bucketed.seconds
    moved = naive.breakdown.collectives["all_reduce"]
    assert moved.bytes == pytest.approx(4 * model.parameters, rel=1e-6)
    assert moved.exposed_seconds == pytest.approx(moved.seconds)


@pytest.mark.parametrize("shard", ["none", "zero1", "zero2", "zero3", "zero3-once"])
def test_ranks_move_the_bytes_that_their_sharding_takes(shard):
    model, count = workload(), 3
    plan = SettledPlan(dp=4, shard=shard, microbatch=1, precision="bf16")
    moved = simulate(model, cluster_of(4), plan, 4 * count).breakdown.collectives
    gradients = 4 * model.parameters
    if shard == "none":
        assert moved["all_reduce"].bytes == pytest.approx(gradients, rel=1e-6)
        return
    rounds = 1 if shard in ("zero1", "zero3-once") else count
    assert moved["reduce_scatter"].bytes == pytest.approx(rounds * gradients, rel=1e-6)
    # zero3 gathers in forward and again in backward, but for what is there still when it turns round.
    stays = model.embedding, model.layers[-1], model.end
    twice = 2 * model.parameters - sum(block.parameters.total for block in stays)
    gathered = count * twice if shard.startswith("zero3") else model.parameters
    assert moved["all_gather"].bytes == pytest.approx(2 * gathered, rel=1e-6)


def test_hybrid_sharding_reduces_over_shards_and_then_over_replicas():
    model = workload()
    plan = SettledPlan(dp=8, replicate=2, shard="zero3", microbatch=1, precision="bf16")
    moved = simulate(model, cluster_of(8), plan, 8).breakdown.collectives
    assert moved["reduce_scatter"].bytes == pytest.approx(4 * model.parameters, rel=1e-6)
    others = moved["all_reduce"].bytes - 8  # the norm of all gradients
    assert others == pytest.approx(4 * model.parameters / 4, rel=1e-6)


@pytest.mark.parametrize("bucket", [1 << 20, 1 << 23, 1 << 25])
def test_buckets_hold_at_most_their_bytes_of_weights_and_all_parameters(bucket):
    model = workload()
    plan = SettledPlan(dp=2, microbatch=1, bucket=bucket, precision="bf16")
    simulated = simulate(model, cluster_of(2), plan, 2)
    sizes = [span.bytes for span in simulated.timeline if span.name.startswith("all_reduce:bucket")]
    assert max(sizes) <= 2 * bucket + 4  # sums have twice the weights' width; rounded up
    assert sum(sizes) == pytest.approx(4 * model.parameters, rel=1e-6)


def test_a_rank_computes_one_thing_at_a_time_and_exchanges_data_in_turn():
    plan = SettledPlan(dp=2, pp=4, tp=2, shard="zero1", microbatch=1, bucket=1 << 22, precision="bf16")
    timeline = simulate(workload(), cluster_of(16, rate=5e9), plan, 16, steps=2).timeline
    for rank in timeline.ranks:
        spans = timeline.of(rank)
        works = [span for span in spans if span.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER)]
        buckets = [span for span in spans if "bucket" in span.name and span.lane == Lane.COMMUNICATION]
        for row in (works, buckets):
            assert all(after.start >= span.stop - 1e-12 for span, after in itertools.pairwise(row))


@pytest.mark.parametrize("plan", ["pp=4,dp=2,tp=2,shard=zero3", "dp=8,tp=2,shard=zero2", "cp=4,tp=4"])
def test_the_parts_of_a_predicted_step_are_its_time(plan):
    plan = SettledPlan.parse(f"{plan},microbatch=1,precision=bf16")
    simulated = simulate(workload(), cluster_of(16, rate=1e10), plan, 8 * plan.dp)
    parts = simulated.breakdown.parts
    assert sum(parts.disjoint().values()) == pytest.approx(parts.wall)
    assert parts.data_wait == 0
    assert parts.other == pytest.approx(0, abs=parts.wall * 1e-6)
    assert parts.exposed_communication > 0


def test_the_bubble_of_equal_stages_is_what_papers_say():
    model = workload(32, vocab=64)
    plan = SettledPlan(pp=4, microbatch=1, split="count", precision="bf16")
    simulated = simulate(model, cluster_of(4, **FREE), plan, 16)
    step = simulated.breakdown.parts
    ideal = 16 / (16 + 3)  # 1F1B idles (p - 1) of (m + p - 1) forwards and backwards
    played = simulated.played.makespan
    # The ends make the last stage slower than the mean: what that causes is waiting, not bubble.
    assert step.bubble == pytest.approx((1 - ideal) * played, rel=0.05)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("tensor", ["sequence", "plain"])
def test_tensor_parallelism_communicates_as_often_as_the_runtime(tensor, recompute):
    """See the table of `_Products`; the ends have one half of a join each, and are not recomputed."""
    model, count = workload(), 2
    plan = SettledPlan(tp=4, microbatch=1, tensor=tensor, recompute=recompute, precision="bf16")
    moved = simulate(model, cluster_of(4), plan, count).breakdown.collectives
    joins = sum(layer.joins for layer in model.layers)
    forwards = joins * (2 if recompute == "full" else 1)
    losses = 1
    if tensor == "plain":
        reduced = forwards + joins + 2  # the embedding's in forward, the end's in backward
        of_step = 1 + 2  # the gradients' norm; of what is whole on each rank, those of the end and of layers
        assert moved["all_reduce"].count - of_step == count * reduced
        assert moved["all_gather"].count == count * losses
    else:
        assert moved["all_gather"].count == count * (forwards + 2 * joins + 3 + losses)
        assert moved["reduce_scatter"].count == count * (forwards + joins + 2)
        stream = 2 * model.length * model.hidden
        assert moved["reduce_scatter"].bytes == moved["reduce_scatter"].count * stream


def test_a_tied_embedding_is_summed_between_the_first_and_the_last_stage():
    plan = SettledPlan(pp=2, microbatch=1, precision="bf16")
    timeline = simulate(workload(tied=True), cluster_of(2), plan, 8).timeline
    spans = [span for span in timeline if span.name == "all_reduce:embedding"]
    collectives = [span for span in spans if span.kind == Kind.COLLECTIVE]
    assert [span.group for span in collectives] == [(0, 1), (0, 1)]


def test_played_ranks_have_their_numbers_in_the_mesh():
    plan = SettledPlan(pp=2, dp=2, tp=2, microbatch=1, precision="bf16")
    assert simulate(workload(), cluster_of(8), plan, 16).timeline.ranks == (0, 4)


def test_messages_have_the_names_that_the_runtime_gives_them():
    plan = SettledPlan(pp=2, microbatch=1, precision="bf16")
    timeline = simulate(workload(), cluster_of(2), plan, 4).timeline
    named = {span.name for span in timeline.of(1) if span.kind == Kind.COLLECTIVE}
    wanted = {f"activation:1F{each}" for each in range(4)} | {f"gradient:0B{each}" for each in range(4)}
    assert wanted <= named
    assert {span.name for span in timeline.of(0) if span.kind == Kind.FORWARD} == {
        f"0F{each}" for each in range(4)
    }


def test_steps_follow_one_another_and_take_as_long():
    plan = SettledPlan(dp=2, pp=2, shard="zero1", microbatch=1, precision="bf16")
    one = simulate(workload(), cluster_of(4), plan, 16)
    three = simulate(workload(), cluster_of(4), plan, 16, steps=3)
    assert three.timeline.steps() == (0, 1, 2)
    assert three.seconds == pytest.approx(
        one.seconds, rel=0.01
    )  # ranks end and begin at slightly other times


def test_devices_that_differ_along_data_parallelism_collapse_into_one():
    plan = SettledPlan(dp=2048, tp=8, shard="zero1", microbatch=1, precision="bf16")
    simulated = simulate(workload(), cluster_of(16384), plan, 2048)
    assert simulated.timeline.ranks == (0,)
    assert simulated.tokens_per_second == pytest.approx(2048 * 1024 / simulated.seconds)
    assert simulated.tokens_per_second_per_device == pytest.approx(simulated.tokens_per_second / 16384)


def test_mfu_is_the_models_flop_over_the_devices_peak():
    model = workload()
    simulated = simulate(model, cluster_of(2), SettledPlan(dp=2, microbatch=1, precision="bf16"), 2)
    assert simulated.mfu == pytest.approx(2 * model.training_flop / simulated.seconds / (2 * 3e14))
    assert 0 < simulated.mfu < 1
    assert math.isfinite(simulated.seconds)


def test_what_cannot_be_played_is_refused():
    cluster = cluster_of(4)
    with pytest.raises(PlanError, match="is for 2 ranks"):
        simulate(workload(), cluster, Plan(dp=2), 8)
    with pytest.raises(PlanError, match="does not divide over"):
        simulate(workload(), cluster, Plan(dp=4), 6)
    device = dataclasses.replace(cluster.device, peak={"fp32": 1e12})
    with pytest.raises(ClusterError, match="bf16 is not known"):
        simulate(workload(), cluster.replace(device=device), Plan(dp=4, precision="bf16"), 8)
