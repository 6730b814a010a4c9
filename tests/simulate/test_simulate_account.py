"""What is summed up of a play, against what its spans explain."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.predict.cost import Costs
from shoal.predict.simulate import simulate
from shoal.spec.cluster import Cluster, Device, Host, Level
from shoal.spec.plan import Plan, SettledPlan
from shoal.spec.timeline import explain
from shoal.spec.workload import ModelShape, workload_of

MODEL = workload_of(ModelShape(layers=8, hidden=512, ffn=2048, heads=8, vocab=4096, seq=256))


def cluster(devices: int, rate: float) -> Cluster:
    device = Device(
        name="device", memory=8e10, bandwidth=2e12, peak={"bf16": 3e14}, units=108, dispatch=0.0, launch=0.0
    )
    return Cluster(
        name="test", device=device, levels=(Level(name="switch", devices=devices, bandwidth=rate),)
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    pp = draw(st.sampled_from((1, 2, 4)))
    schedule = draw(st.sampled_from(("gpipe", "1f1b", "zb-h1", "zb-v", "interleaved"))) if pp > 1 else "1f1b"
    return SettledPlan(
        pp=pp,
        dp=draw(st.sampled_from((1, 2))),
        tp=draw(st.sampled_from((1, 2))),
        schedule=schedule,
        virtual=2 if schedule in ("zb-v", "interleaved") else 1,
        shard=draw(st.sampled_from(("none", "zero1", "zero2", "zero3", "zero3-once"))),
        microbatch=1,
        precision="bf16",
    )


@given(plans(), st.sampled_from((1e9, 1e10, 1e12)))
@settings(deadline=None, max_examples=40)
def test_the_parts_are_those_that_the_spans_explain(plan, rate):
    simulated = simulate(MODEL, cluster(plan.ranks, rate), plan, 4 * plan.dp)
    spans = explain(simulated.timeline)
    for ours, theirs in zip(simulated.breakdown.ranks, spans.ranks, strict=True):
        assert ours.rank == theirs.rank
        close = {"rel": 1e-6, "abs": 1e-9 * theirs.parts.wall}
        for name in (
            "wall",
            "compute",
            "bubble",
            "communication",
            "overlapped_communication",
            "bytes",
            "exposed_communication",
            "straggler_wait",
        ):
            assert getattr(ours.parts, name) == pytest.approx(getattr(theirs.parts, name), **close), name
        for operation, figures in theirs.collectives.items():
            assert ours.collectives[operation].count == figures.count
            assert ours.collectives[operation].seconds == pytest.approx(figures.seconds)


@pytest.mark.parametrize("plan", ["dp=4,shard=zero3", "dp=4,shard=zero3-once", "dp=4,shard=zero1", "dp=4"])
def test_without_a_pipeline_what_is_waited_for_is_what_the_spans_explain(plan):
    simulated = simulate(MODEL, cluster(4, 1e9), SettledPlan.parse(f"{plan},microbatch=1,precision=bf16"), 8)
    spans = explain(simulated.timeline)
    assert simulated.breakdown.parts.straggler_wait == spans.parts.straggler_wait == 0
    for operation, figures in spans.collectives.items():
        exposed = simulated.breakdown.collectives[operation].exposed_seconds
        assert exposed == pytest.approx(figures.exposed_seconds)


@pytest.mark.parametrize("plan", ["dp=2,shard=zero3", "pp=2,shard=zero3"])
def test_waits_for_files_are_those_that_the_costs_expose(plan):
    offload = "optimizer:file+gradients:file+parameters:file"
    plan = SettledPlan.parse(f"{plan},microbatch=1,precision=bf16,offload={offload}")
    slow = cluster(2, 1e10).replace(host=Host(name="host", bandwidth=2e11, file_bandwidth=1e9))
    device = dataclasses.replace(slow.device, host_bandwidth=5e10)
    simulated = simulate(MODEL, slow.replace(device=device), plan, 4)
    costs = Costs(MODEL, slow.replace(device=device))
    spans = explain(simulated.timeline)
    waits = [costs.offload(plan, place, plan.microbatches_of(4)).waits for place in range(plan.pp)]
    for place, (ours, theirs) in enumerate(zip(simulated.breakdown.ranks, spans.ranks, strict=True)):
        assert ours.parts.file_wait == pytest.approx(theirs.parts.file_wait)
        assert ours.parts.file_wait == pytest.approx(waits[place])
        assert ours.parts.compute == pytest.approx(theirs.parts.compute)
    assert simulate(MODEL, slow, plan.replace(offload="none"), 4).breakdown.parts.file_wait is None


def test_several_steps_are_told_apart():
    plan = SettledPlan(pp=2, dp=2, shard="zero1", microbatch=1, precision="bf16")
    simulated = simulate(MODEL, cluster(4, 1e10), plan, 16, steps=3)
    spans = explain(simulated.timeline)
    for ours, theirs in zip(simulated.breakdown.ranks, spans.ranks, strict=True):
        assert ours.steps.keys() == theirs.steps.keys()
        for index, parts in theirs.steps.items():
            assert ours.steps[index].wall == pytest.approx(parts.wall)
            assert ours.steps[index].compute == pytest.approx(parts.compute)
            assert ours.steps[index].bytes == pytest.approx(parts.bytes)
