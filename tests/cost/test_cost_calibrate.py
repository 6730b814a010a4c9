"""Calibration brings predictions nearer to a run, and keeps to what a data sheet allows."""

from dataclasses import replace

import pytest

from shoal.cluster import Cluster, Device, Level
from shoal.cost import Costs, Layout
from shoal.cost.collectives.network import collective_seconds
from shoal.cost.outlook.calibrate import calibrate
from shoal.cost.outlook.observation import Observation, Transfer, transfers_of
from shoal.plan import SettledPlan
from shoal.plan.groups import Group
from shoal.simulate import played_parts, played_seconds, simulate
from shoal.timeline import Kind, Lane, Span, Timeline
from shoal.workload import ModelShape, workload_of

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
    timeline = simulate(WORKLOAD, slower, PLAN, BATCH).timeline
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
