"""Calibration brings predictions nearer to a run, and keeps to what a data sheet allows."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.predict.cost import Costs, Layout
from shoal.predict.cost.collectives.network import collective_seconds
from shoal.predict.cost.outlook.calibrate import calibrate
from shoal.predict.cost.outlook.observation import Observation, Transfer, transfers_of
from shoal.predict.simulate import played_parts, played_seconds, simulate
from shoal.spec.cluster import Cluster, Device, Level
from shoal.spec.plan import SettledPlan
from shoal.spec.plan.group import Group
from shoal.spec.timeline import Kind, Lane, Span, Timeline
from shoal.spec.workload import ModelShape, workload_of

DEVICE = Device(
    name="core",
    memory=1e10,
    bandwidth=40e9,
    peak={"fp32": 100e9},
    units=1,
    tile=(16, 16),
    product_share=0.8,
    product_depth=10.0,
    bandwidth_share=0.6,
    attention_share=0.4,
    attention_backward_share=0.3,
    launch=5e-6,
    dispatch=0.0,
)
CLUSTER = Cluster(
    name="two cores",
    device=DEVICE,
    levels=(Level(name="memory", devices=2, bandwidth=10e9, share=0.8, latency=2e-5),),
)
WORKLOAD = workload_of(ModelShape(layers=4, hidden=256, ffn=1024, heads=4, vocab=256, seq=128))
PLAN = SettledPlan.parse("dp=2,shard=zero1,microbatch=4")
BATCH = 16


def observed(compute, optimizer, transfers=(), *, plan=PLAN, stragglers=0.0):
    return Observation(
        workload=WORKLOAD,
        plan=plan,
        batch=BATCH,
        compute=compute,
        optimizer=optimizer,
        stragglers=stragglers,
        transfers=transfers,
    )


def seconds(cluster, plan=PLAN):
    return played_seconds(Costs(WORKLOAD, cluster), plan, BATCH)


def with_shares(**shares):
    return CLUSTER.replace(device=replace(DEVICE, **shares))


def compute_of(cluster, plan=PLAN):
    """Seconds of all blocks' forwards and backwards in a step, without what they wait for."""
    costs, layout = Costs(WORKLOAD, cluster), Layout.of(plan)
    blocks = [costs.block(piece, layout).compute for piece in WORKLOAD.pieces]
    return plan.microbatches_of(BATCH) * sum(each.forward + each.backward for each in blocks)


def optimizer_of(cluster):
    """Seconds of the update in a step."""
    return played_parts(Costs(WORKLOAD, cluster), PLAN, BATCH)["optimizer"]


def test_a_run_of_a_slower_machine_gives_that_machine_back():
    share = 0.7  # of what CLUSTER reaches
    slower = with_shares(
        product_share=0.8 * share,
        attention_share=0.4 * share,
        attention_backward_share=0.3 * share,
        bandwidth_share=0.3,
    ).replace(levels=(replace(CLUSTER.levels[0], share=0.4),))
    timeline = simulate(WORKLOAD, slower, PLAN, BATCH, steps=5).timeline
    found = calibrate(CLUSTER, [Observation.of(WORKLOAD, PLAN, BATCH, timeline)])
    wanted, before, after = (
        played_seconds(Costs(WORKLOAD, each), PLAN, BATCH) for each in (slower, CLUSTER, found.cluster)
    )
    assert abs(after - wanted) < abs(before - wanted) / 4
    # Compute is slowed by what runs beside it in the simulated run, which no share describes.
    device = found.cluster.device
    assert device.product_share * device.sustained == pytest.approx(0.8 * share, rel=0.1)


def test_the_seconds_of_compute_and_optimizer_are_met():
    measured = observed(compute=1.3 * compute_of(CLUSTER), optimizer=1.5 * optimizer_of(CLUSTER))
    found = calibrate(CLUSTER, [measured])
    optimizer, compute = found.corrections
    assert optimizer.after == pytest.approx(optimizer.measured, rel=1e-6)
    assert compute.after == pytest.approx(compute.measured, rel=1e-6)
    assert compute.before == pytest.approx(compute_of(CLUSTER))
    assert abs(compute.left) < 1e-6


def test_no_share_leaves_its_bounds_and_what_is_left_is_told():
    found = calibrate(CLUSTER, [observed(compute_of(CLUSTER) / 100, 0.0)])
    device = found.cluster.device
    assert device.product_share == device.attention_share == device.attention_backward_share == 1.0
    assert found.corrections[0].left > 1  # predicted is still more than twice as long


def test_half_of_the_transfers_are_quicker_than_predicted_with_the_corrected_level():
    group = Group(2)
    true = CLUSTER.replace(levels=(replace(CLUSTER.levels[0], share=0.5),))
    transfers = tuple(
        Transfer(
            "all_reduce", nbytes, group, disturbed * collective_seconds("all_reduce", nbytes, group, true)
        )
        for nbytes, disturbed in ((1 << 20, 1.0), (1 << 22, 1.0), (1 << 24, 30.0))
    )
    found = calibrate(CLUSTER, [observed(0.0, 0.0, transfers)])
    assert found.cluster.levels[0].share == pytest.approx(0.5, rel=1e-6)
    assert [each.name for each in found.corrections] == ["memory"]


@pytest.mark.parametrize("nbytes", [1 << 16, 1 << 30])
@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "all_to_all"])
def test_a_node_is_corrected_by_whatever_protocol_its_transfers_take(operation, nbytes):
    node = CLUSTER.replace(levels=(replace(Cluster.preset("dgx-h100").levels[0], devices=2),))
    predicted = collective_seconds(operation, nbytes, Group(2), node)
    setup = node.levels[0].setup
    transfer = Transfer(operation, nbytes, Group(2), 1.1 * (predicted - setup) + setup)
    (correction,) = calibrate(node, [observed(0.0, 0.0, (transfer,))]).corrections
    assert correction.left == pytest.approx(0.0, abs=1e-6)


def test_a_transfer_counts_from_when_all_of_its_group_are_there():
    def span(rank, start, duration):
        name = "all_reduce:bucket0"
        return Span(rank, Lane.COMMUNICATION, Kind.COLLECTIVE, name, start, duration, 1 << 20, (0, 1))

    steps = [Span(rank, Lane.COMPUTE, Kind.STEP, "1", 0.0, 1.0) for rank in (0, 1)]
    timeline = Timeline([*steps, span(0, 0.1, 0.5), span(1, 0.4, 0.2)])
    (transfer,) = transfers_of(timeline)
    assert transfer.group == Group(2)
    assert transfer.seconds == pytest.approx(0.2)


def test_of_cores_no_data_sheet_bounds_the_rates():
    cores = CLUSTER.replace(cores=2)
    quick = observed(compute_of(cores) / 100, optimizer_of(cores) / 100)
    optimizer, compute = calibrate(cores, [quick]).corrections
    assert compute.left == pytest.approx(0.0, abs=1e-3)
    assert optimizer.left == pytest.approx(0.0, abs=1e-3)


def test_an_update_on_cores_says_nothing_of_other_passes():
    cores = CLUSTER.replace(cores=2)
    found = calibrate(cores, [observed(compute_of(cores), optimizer_of(cores) * 100)])
    share = found.cluster.device.stream_share
    assert share == pytest.approx(DEVICE.bandwidth_share / 100, rel=1e-2)  # launches count little
    assert found.cluster.device.bandwidth == pytest.approx(DEVICE.bandwidth)
    assert found.cluster.device.bandwidth_share == DEVICE.bandwidth_share
    assert [each.left for each in found.corrections] == pytest.approx([0.0, 0.0], abs=1e-3)


def test_several_runs_are_over_and_under_by_the_same_proportion():
    cores = CLUSTER.replace(cores=2)
    plans = [PLAN, SettledPlan.parse("tp=2,microbatch=16")]
    factors = (1.0, 4.0)
    runs = [
        observed(factor * compute_of(cores, plan), 0.0, plan=plan)
        for factor, plan in zip(factors, plans, strict=True)
    ]
    found = calibrate(cores, runs).cluster
    left = [compute_of(found, run.plan) / run.compute for run in runs]
    assert left[0] * left[1] == pytest.approx(1.0, rel=1e-3)
    assert left[0] > 1 > left[1]


def test_waits_for_later_ranks_become_the_jitter_that_explains_them():
    true = CLUSTER.replace(jitter=0.1)
    waited = simulate(WORKLOAD, true, PLAN, BATCH).breakdown.parts.straggler_wait
    found = calibrate(CLUSTER, [observed(0.0, 0.0, stragglers=waited)]).cluster
    assert found.jitter == pytest.approx(0.1, rel=0.01)


def test_a_pipelines_waits_are_its_stages_and_say_nothing_of_jitter():
    plan = SettledPlan.parse("pp=2,microbatch=2")
    assert calibrate(CLUSTER, [observed(0.0, 0.0, plan=plan, stragglers=1.0)]).cluster == CLUSTER


def test_what_compute_waits_for_shows_a_rate_better_than_what_runs_beside_it():
    def step(rank):
        spans = [Span(rank, Lane.COMPUTE, Kind.STEP, "1", 0.0, 10.0)]
        for name, start, seconds in (("hidden", 1.0, 3.0), ("waited for", 5.0, 0.5)):
            span = (f"all_reduce:{name}", start, seconds)
            spans.append(Span(rank, Lane.COMMUNICATION, Kind.COLLECTIVE, *span, 1 << 20, (0, 1)))
        spans.append(Span(rank, Lane.COMPUTE, Kind.WAIT, "all_reduce:waited for", 5.0, 0.5))
        return spans

    (transfer,) = transfers_of(Timeline([*step(0), *step(1)]))
    assert transfer.seconds == pytest.approx(0.5)


def recorded(cluster, slowed, plan=PLAN, steps=20):
    """A run's Timeline on a machine whose spans take longer by a factor of their step and rank."""
    played = simulate(WORKLOAD, cluster, plan, BATCH).timeline
    length = max(span.stop for span in played.of(0))
    spans, start = [], 0.0
    ranks = range(plan.ranks)
    for step in range(1, steps + 1):
        factors = [slowed(step, rank) for rank in ranks]
        for rank, factor in zip(ranks, factors, strict=True):
            spans += [
                replace(
                    span,
                    rank=rank,
                    start=start + factor * span.start,
                    duration=factor * span.duration,
                    name=str(step) if span.kind == Kind.STEP else span.name,
                )
                for span in played.of(0)
            ]
        start += 1.01 * max(factors) * length
    return Timeline(spans)


def after(slowed, true=CLUSTER, plan=PLAN):
    timeline = recorded(true, slowed, plan)
    return calibrate(CLUSTER, [Observation.of(WORKLOAD, plan, BATCH, timeline)])


def moved(found, true=CLUSTER):
    """Largest change of predictions, as a share, over Plans that were not run."""
    plans = [PLAN, *map(SettledPlan.parse, ("tp=2,microbatch=16", "dp=2,shard=zero3,microbatch=2"))]
    return max(abs(seconds(found.cluster, plan) / seconds(true, plan) - 1) for plan in plans)


@pytest.fixture
def noise():
    return random.Random(0)


def test_random_slow_steps_move_no_prediction(noise):
    slow = {step for step in range(1, 21) if noise.random() < 0.3}
    assert slow
    assert moved(after(lambda step, rank: 3.0 if step in slow else 1.0)) < 0.01


@pytest.mark.parametrize("busy", [6, 10, 15])
def test_a_neighbour_that_takes_the_cores_for_a_part_of_a_run_moves_no_prediction_much(busy):
    found = after(lambda step, rank: 1.6 if step > 20 - busy else 1.0)
    assert moved(found) < 0.01
    assert found.cluster.calibrated.by == ("runs" if busy < 10 else "")


def test_a_neighbour_that_takes_a_changing_share_moves_no_prediction_and_the_reason_is_said(noise):
    factors = [[1 + noise.random() for _ in range(21)] for _ in range(2)]
    found = after(lambda step, rank: factors[rank][step])
    assert found.cluster == CLUSTER
    assert all("beside other work" in each.reason for each in found.corrections)


@given(spread=st.floats(0.0, 0.1), factor=st.floats(0.5, 2.0))
def test_a_correction_grows_with_the_difference_and_never_exceeds_it(spread, factor):
    compute = compute_of(CLUSTER.replace(cores=2))
    run = replace(observed(factor * compute, 0.0), compute_spread=spread)
    (found,) = calibrate(CLUSTER.replace(cores=2), [run]).corrections
    whole, share = math.log(factor), math.log(found.after / found.before)
    wanted = max(0.0, 1 - (spread / whole) ** 2) if whole else 0.0
    assert share == pytest.approx(wanted * whole, abs=1e-3)


def test_a_neighbour_of_one_rank_makes_no_jitter_and_says_so():
    found = after(lambda step, rank: 1.5 if rank else 1.0)
    assert found.cluster.jitter == CLUSTER.jitter
    reasons = {each.name: each.reason for each in found.corrections}
    assert "beside other work" in reasons["stragglers"]
    assert "beside other work" in reasons["compute"]


@pytest.mark.parametrize("true", [0.6, 1.3])
def test_a_clean_run_of_another_machine_is_still_told_from_noise(true, noise):
    factors = [1 / true * noise.gauss(1.0, 0.02) for _ in range(21)]
    found = after(lambda step, rank: factors[step])
    wanted = CLUSTER.replace(device=DEVICE.slowed(1 / true))
    compute = next(each for each in found.corrections if each.name == "compute")
    assert compute.corrected > 0.95
    assert abs(compute.left) < abs(compute.before / compute.measured - 1) / 10 + 0.005
    assert moved(found, wanted) < moved(found) / 2
    assert found.cluster.calibrated.by == "runs"
    assert found.cluster.calibrated.devices == 2


def test_a_run_that_agrees_confirms_the_machine_and_changes_nothing_much(noise):
    found = after(lambda step, rank: noise.gauss(1.0, 0.01))
    assert found.cluster.calibrated.by == "runs"
    assert found.cluster.calibrated.error < 0.05
    assert moved(found) < 0.02


def test_a_steady_run_counts_for_more_than_one_that_varies():
    cores = CLUSTER.replace(cores=2)
    compute = compute_of(cores)
    steady, varied = observed(1.2 * compute, 0.0), observed(3.0 * compute, 0.0)
    found = calibrate(cores, [steady, replace(varied, compute_spread=0.5)]).cluster
    assert compute_of(found) == pytest.approx(1.2 * compute, rel=0.02)


def test_a_run_beside_other_work_still_corrects_a_machine_that_is_far_from_its_description(noise):
    factors = [8 * (1 + noise.random()) for _ in range(21)]
    compute = next(
        each for each in after(lambda step, rank: factors[step]).corrections if each.name == "compute"
    )
    assert 0.1 < compute.spread < 0.4
    assert compute.corrected > 0.95


def test_too_few_steps_tell_nothing():
    timeline = simulate(WORKLOAD, with_shares(product_share=0.3), PLAN, BATCH, steps=2).timeline
    found = calibrate(CLUSTER, [Observation.of(WORKLOAD, PLAN, BATCH, timeline)])
    assert found.cluster == CLUSTER
    assert all("too few" in each.reason for each in found.corrections)
