"""What a probe of a GPU makes of its measurements: those of the device, those of the host, and bad ones."""

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
from probe_stand_ins import LAUNCH, Simulated

from shoal.errors import DataError
from shoal.machine.probe import fitted, read_measurements
from shoal.machine.probe.device import queued_seconds
from shoal.machine.probe.measurements import AttentionTime, Measurements, PassTime, ProductTime
from shoal.machine.probe.sheet import Sheet
from shoal.spec.cluster import Cluster, Device
from shoal.spec.workload import Attention

HOST = 40e-6
PRESET = Device.preset("h100")
TRUE = replace(
    PRESET,
    product_share=0.6,
    product_depth=300.0,
    bandwidth_share=0.7,
    stream_share=0.8,
    attention_share=0.5,
    attention_backward_share=0.3,
    launch=LAUNCH,
    dispatch=HOST,
)
MACHINE = Cluster.preset("dgx-h100", 1).replace(device=TRUE)
SHEET = Sheet(
    device="NVIDIA H100 80GB HBM3",
    memory=PRESET.memory,
    units=132,
    on_cores=False,
    devices=1,
    devices_per_host=1,
    cores=16,
    inside="scale-up",
    network=0.0,
    rdma=(),
    source="a test",
)
SIZES = ((64, 64, 64), (1024, 1024, 1024), (8192, 8192, 8192), (8192, 512, 8192), (4096, 2048, 14336))
FIELDS = (
    "product_share",
    "product_depth",
    "bandwidth_share",
    "stream_share",
    "attention_share",
    "attention_backward_share",
)


def measured(seconds_of, **changes):
    """All kinds of measurements; a function gives the seconds of each from those of the device."""

    def timed(each):
        return replace(each, seconds=seconds_of(each.predicted(MACHINE)))

    lengths = (Attention(length, 32, 32, 128, 128) for length in (128, 4096, 8192))
    return Measurements(
        products=tuple(timed(ProductTime(name, *size, 1.0)) for name in ("fp32", "bf16") for size in SIZES),
        passes=tuple(
            timed(PassTime(f"pass {is_stream}", nbytes, 1, 1.0, is_stream=is_stream))
            for nbytes in (1e5, 1e8, 1e9)
            for is_stream in (False, True)
        ),
        attention=tuple(
            timed(AttentionTime("bf16", each, half, 1.0))
            for each in lengths
            for half in ("forward", "backward")
        ),
        launch=LAUNCH,
        dispatch=HOST,
        contention=0.0,
        **changes,
    )


def test_rates_are_found_from_times_apart_from_the_host():
    def on_the_stand_in(seconds):
        clock = Simulated(HOST)
        return queued_seconds(partial(clock.start, seconds - LAUNCH), clock, 0.02)

    found = fitted(measured(on_the_stand_in, is_apart=True), SHEET, "apart")
    assert found.suspicions == ()
    device = found.cluster.device
    assert [getattr(device, name) for name in FIELDS] == pytest.approx(
        [getattr(TRUE, name) for name in FIELDS], rel=0.05
    )
    assert (device.dispatch, device.launch, device.peak) == (HOST, LAUNCH, PRESET.peak)


def test_rates_are_found_from_times_with_the_host_by_leaving_out_what_is_the_hosts():
    found = fitted(measured(lambda seconds: max(HOST, seconds)), SHEET, "with the host")
    assert found.suspicions == ()
    rates = ("product_share", "bandwidth_share", "stream_share", "attention_share")
    assert [getattr(found.cluster.device, name) for name in rates] == pytest.approx(
        [getattr(TRUE, name) for name in rates], rel=0.15
    )
    assert {each.quantity: each.measured for each in found.errors}["attention forward"] == 2  # not the least


def test_a_fit_that_errs_is_told_and_the_preset_stays():
    """Attention that takes ten times as long at one length as at another fits no share."""
    good = measured(lambda seconds: seconds, is_apart=True)
    bad = [
        replace(each, seconds=each.seconds * 10 ** (index % 3)) for index, each in enumerate(good.attention)
    ]
    found = fitted(replace(good, attention=tuple(bad)), SHEET, "bad")
    assert any("attention forward errs" in each and "stay the preset's" in each for each in found.suspicions)
    device = found.cluster.device
    assert device.attention_share == PRESET.attention_share
    assert device.product_share == pytest.approx(0.6, rel=0.05)
    assert "as of the preset" in device.source
    unknown = fitted(replace(good, attention=tuple(bad)), replace(SHEET, device="Z9000"), "bad")
    assert "doubtful" in unknown.cluster.device.source


def test_measurements_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "probe.json"
    given = measured(lambda seconds: seconds, is_apart=True)
    path.write_text(json.dumps({"measurements": asdict(given), "sheet": asdict(SHEET)}))
    assert read_measurements(path) == (given, SHEET)
    path.write_text("{}")
    with pytest.raises(DataError, match="KeyError"):
        read_measurements(path)


def test_old_measurements_of_one_h100_fit_sensible_rates():
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "data" / "probe_h100.json"
    found = fitted(*read_measurements(path), "h100")
    device = found.cluster.device
    assert found.suspicions == ()
    assert max(each.median for each in found.errors) < 0.12
    assert device.peak["bf16"] * device.product_share == pytest.approx(800e12, rel=0.1)
    assert device.bandwidth * device.stream_share == pytest.approx(2.7e12, rel=0.1)
    assert device.dispatch == pytest.approx(42e-6, rel=0.1)
