"""The band of a prediction: which rows it comes from, and what is outside of all rows."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.predict.cost.outlook import band_of
from shoal.predict.cost.outlook.band import SIZES, kind_of
from shoal.predict.cost.time import workload_on
from shoal.spec.cluster import PRESETS, Calibrated, Cluster
from shoal.spec.plan import Plan
from shoal.spec.workload import shape, workload_of

H100 = Cluster.preset("dgx-h100", 64)
MODEL = workload_on(H100, shape("llama3-8b"))
PLAN = Plan.parse("dp=64,shard=zero3,microbatch=1,precision=bf16")


def band(cluster=H100, plan=PLAN, workload=MODEL):
    return band_of(workload, cluster, plan)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x7b"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_every_prediction_has_a_band_and_says_what_it_stands_on(preset, name, precision):
    cluster = Cluster.preset(preset)
    plan = Plan.parse(f"dp={cluster.devices},microbatch=1,precision={precision}")
    found = band(cluster, plan, workload_on(cluster, shape(name)))
    assert 0 < found.low < found.high
    low, high = found.around(2.0)
    assert high / low == pytest.approx(found.high / found.low)
    assert ("outside" in found.validated) == bool(found.outside)


def test_the_kind_is_the_model_the_device_the_program_and_the_size():
    assert kind_of(MODEL, H100, PLAN) == ("dense", "Hopper", "compiled in bf16", SIZES[2])
    one = Plan.parse("dp=1,microbatch=1,precision=bf16,compile=none")
    assert kind_of(MODEL, H100, one)[2:] == ("operator by operator in bf16", SIZES[0])
    fused = workload_of(shape("llama3-8b"))
    assert kind_of(fused, H100, Plan.parse("tp=8"), "fp8")[2:] == ("fused kernels in fp8", SIZES[1])


@pytest.mark.parametrize(
    ("cluster", "plan", "told"),
    [
        (Cluster.preset("dgx-a100", 64), PLAN.replace(precision="fp32"), "fp32 on A100 and A800"),
        (Cluster.preset("laptop", 2), Plan.parse("dp=2"), "cores"),
        (H100.with_devices(16384), PLAN.replace(dp=16384), "16384 devices"),
        (H100, PLAN.replace(shard="zero3-once"), "shard=zero3-once"),
    ],
)
def test_what_was_never_measured_is_named_and_has_the_widest_band(cluster, plan, told):
    workload = workload_on(cluster, shape("llama3-8b"))
    found = band(cluster, plan, workload)
    assert told in found.validated
    assert found.validated.startswith("outside of what was validated")
    usual = band()
    assert found.low <= usual.low
    assert found.high >= usual.high


def test_a_measured_cluster_has_the_band_of_measured_clusters_as_far_as_it_was_measured():
    run = H100.replace(calibrated=Calibrated(by="runs", devices=8, error=0.01))
    within = Plan.parse("dp=8,microbatch=1,precision=bf16")
    assert band(run.with_devices(8), within).kind == ("runs on Hopper",)
    assert band(run).kind == band().kind  # several nodes were not measured
    whole = run.replace(calibrated=Calibrated(by="runs", devices=64, error=0.01))
    found = band(whole)
    assert found.high / found.low < band().high / band().low
    assert band(whole, PLAN.replace(shard="zero3-once")).outside


@given(error=st.floats(0.0, 0.9))
def test_a_measured_cluster_is_never_surer_than_the_error_that_was_left(error):
    run = H100.replace(calibrated=Calibrated(by="runs", devices=64, error=error))
    found = band(run)
    assert found.high >= (1 + error) * (1 - 1e-9)
    assert math.log(found.low) <= -math.log1p(error) + 1e-9
