"""The fit gives back a machine from what the cost model says that it takes."""

from dataclasses import replace

import pytest

from shoal.machine.probe.fit import fit, trusted
from shoal.machine.probe.measurements import (
    AttentionTime,
    CollectiveTime,
    Measurements,
    PassTime,
    ProductTime,
    SendTime,
    SynchronisationTime,
)
from shoal.machine.probe.sheet import Sheet
from shoal.predict.cost.time.jitter import normal_maximum
from shoal.spec.cluster import Cluster, Device, Level
from shoal.spec.plan.group import Group
from shoal.spec.workload import Attention

TRUE = Cluster(
    name="true",
    device=Device(
        name="core",
        memory=1e9,
        bandwidth=40e9,
        peak={"fp32": 90e9, "bf16": 360e9},
        units=1,
        tile=(16, 16),
        product_share=1.0,
        product_depth=20.0,
        stall=1.0,
        bandwidth_share=0.5,
        stream_share=0.3,
        attention_share=0.3,
        attention_backward_share=0.2,
        launch=5e-6,
        dispatch=0.0,
    ),
    levels=(
        Level(name="memory", devices=4, bandwidth=12e9, share=0.8, setup=4e-5, latency=2e-5, half_size=1e5),
        Level(name="network", devices=16, bandwidth=2e9, share=0.6, latency=9e-5, half_size=1e6),
    ),
)
SHEET = Sheet(
    device="core",
    memory=1e9,
    units=1,
    on_cores=True,
    devices=16,
    devices_per_host=4,
    cores=4,
    inside="memory",
    network=2e9,
    rdma=(),
    source="a test",
)
SIZES = [1 << power for power in range(10, 27, 4)]


def true(measurement):
    return replace(measurement, seconds=measurement.predicted(TRUE))


def measured_of_the_true_machine():
    shapes = [(size, size, size) for size in (16, 64, 256, 1024)] + [(1024, 16, 1024), (1024, 64, 16)]
    links = []
    for level, size, stride in ((0, 4, 1), (1, 16, 1), (1, 4, 4)):
        for nbytes in SIZES:
            links += [
                CollectiveTime(level, name, Group(size, stride), nbytes, 1.0)
                for name in ("all_reduce", "all_gather", "all_to_all", "broadcast")
            ]
            if (level, stride) != (1, 1):
                links.append(SendTime(level, stride, nbytes, 1.0))
    attention = Attention(512, 8, 8, 64, 64)
    return Measurements(
        products=tuple(
            true(ProductTime(precision, *shape, 1.0)) for precision in ("fp32", "bf16") for shape in shapes
        ),
        passes=tuple(
            true(PassTime("pass", nbytes, 1, 1.0, is_stream=is_stream))
            for nbytes in SIZES
            for is_stream in (False, True)
        ),
        attention=tuple(
            true(AttentionTime("fp32", attention, half, 1.0)) for half in ("forward", "backward")
        ),
        launch=5e-6,
        dispatch=0.0,
        contention=0.4,
        links=tuple(map(true, links)),
    )


def fitted_alone(**changes):
    """Of few measurements on one device, which is quick."""
    measured = measured_of_the_true_machine()
    few = replace(measured, products=measured.products[::5], passes=measured.passes[:4], links=(), **changes)
    return fit(few, replace(SHEET, devices=1, devices_per_host=1), "fitted")


@pytest.fixture(scope="module")
def fitted():
    return fit(measured_of_the_true_machine(), SHEET, "fitted")


def test_every_measurement_is_predicted_by_the_cluster_that_is_fitted_to_them(fitted):
    for each in measured_of_the_true_machine().all:
        # Measured without noise: what is left is the search's step, where numbers trade for one another.
        assert each.predicted(fitted) == pytest.approx(each.seconds, rel=0.02), each


def test_rates_of_the_device_are_those_of_the_true_machine(fitted):
    device, wanted = fitted.device, TRUE.device
    for precision in ("fp32", "bf16"):
        rate = device.peak[precision] * device.product_share
        assert rate == pytest.approx(wanted.peak[precision] * wanted.product_share, rel=0.05)
    assert device.bandwidth * device.bandwidth_share == pytest.approx(20e9, rel=0.01)
    assert device.bandwidth * device.stream_share == pytest.approx(12e9, rel=0.01)
    assert device.contention == 0.4


def test_the_levels_have_the_devices_of_the_hosts_and_the_rate_of_the_data_sheet(fitted):
    inside, network = fitted.levels
    assert (inside.name, inside.devices) == ("memory", 4)
    assert (network.name, network.devices, network.bandwidth) == ("network", 16, 2e9)
    assert network.share == pytest.approx(0.6, rel=0.1)


def meeting(ranks, jitter, noise, work):
    behind = normal_maximum(ranks, 1.0) - 1
    return SynchronisationTime(ranks, work, behind * (jitter * work + noise * work**0.5))


@pytest.mark.parametrize(("jitter", "noise"), [(0.03, 0.002), (0.0, 0.004), (0.02, 0.0), (0.0, 0.0)])
def test_meetings_tell_a_slower_rank_from_delays_at_random(jitter, noise):
    times = tuple(meeting(4, jitter, noise, work) for work in (0.002, 0.008, 0.03))
    cluster = fitted_alone(synchronisations=times)
    assert (cluster.jitter, cluster.noise) == pytest.approx((jitter, noise), abs=1e-9)


@pytest.mark.parametrize("seconds", [-1e-4, 0.0])
def test_meetings_that_seem_to_take_less_than_nothing_are_noise(seconds):
    times = tuple(SynchronisationTime(2, work, seconds * work) for work in (0.002, 0.008, 0.03))
    cluster = fitted_alone(synchronisations=times)
    assert (cluster.jitter, cluster.noise) == (0.0, 0.0)


def test_ranks_that_wait_for_longer_than_they_work_give_a_cluster_and_a_doubt():
    # Other programs had the core of one of two ranks for four times as long as its work takes.
    times = tuple(SynchronisationTime(2, work, 4 * work) for work in (0.002, 0.008, 0.03))
    cluster = fitted_alone(synchronisations=times)
    assert cluster.jitter == 0.99
    _, doubts = trusted(cluster, (), None)
    assert ["vary by 99%" in doubt for doubt in doubts] == [True]


def test_a_slice_of_the_scheduler_at_each_meeting_gives_a_cluster_and_a_doubt():
    times = tuple(SynchronisationTime(2, work, 0.03) for work in (0.002, 0.008, 0.03))
    cluster = fitted_alone(synchronisations=times)
    assert (cluster.jitter, cluster.noise) == (0.0, 0.99)
    _, doubts = trusted(cluster, (), None)
    assert ["varies by 990 ms" in doubt for doubt in doubts] == [True]


def test_one_device_alone_has_a_level_without_links():
    assert [level.devices for level in fitted_alone().levels] == [1]


def test_cores_are_described_as_shared_and_accelerators_are_not(fitted):
    assert fitted.cores == SHEET.cores
    measured = replace(measured_of_the_true_machine(), links=())
    assert fit(measured, replace(SHEET, on_cores=False, devices=1, devices_per_host=1), "mine").cores == 0
