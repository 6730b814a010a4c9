"""Ranks that share the cores and the memory of a node."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ClusterError
from shoal.spec.cluster import Cluster, Device, Level

DEVICE = Device(
    name="core", memory=8e9, bandwidth=10e9, peak={"fp32": 100e9}, units=1, launch=1e-6, dispatch=2e-6
)


def node(devices, cores):
    level = Level(name="memory", devices=devices, bandwidth=5e9)
    return Cluster(name="node", device=DEVICE, levels=(level,), cores=cores)


def test_ranks_that_outnumber_cores_have_a_part_of_a_cores_rates():
    shared = node(2, 2).with_devices(8).device
    assert shared.peak["fp32"] == pytest.approx(100e9 / 4)
    assert shared.bandwidth == pytest.approx(10e9 / 4)
    assert shared.launch == pytest.approx(4e-6)
    assert shared.dispatch == pytest.approx(8e-6)


def test_ranks_with_a_core_each_keep_its_rates():
    assert node(2, 8).with_devices(8).device.peak == DEVICE.peak
    assert node(2, 8).with_devices(8).crowding == 1


@given(st.integers(2, 16), st.integers(1, 16), st.integers(2, 64))
def test_all_ranks_together_have_the_same_cores_and_memory(devices, cores, asked):
    before = node(devices, cores)
    after = before.with_devices(asked)
    assert after.device.memory * asked == pytest.approx(before.device.memory * devices)
    # A rank's rate times the ranks on its core is that of the core.
    assert after.device.bandwidth * after.crowding == pytest.approx(before.device.bandwidth * before.crowding)


def test_rates_measured_on_shared_cores_rise_where_fewer_ranks_share_them():
    crowded = node(4, 2)
    assert crowded.crowding == 2
    assert crowded.with_devices(2).device.peak["fp32"] == pytest.approx(200e9)


def test_fewer_cores_slow_the_ranks_that_are_there():
    assert node(4, 4).with_cores(2).device.peak["fp32"] == pytest.approx(50e9)
    with pytest.raises(ClusterError, match="cores=0"):
        node(4, 4).with_cores(0)


def test_a_description_of_one_rank_has_no_links_for_a_second():
    with pytest.raises(ClusterError, match="no links to others"):
        node(1, 2).with_devices(2)


def test_devices_that_are_no_cores_are_never_crowded():
    accelerators = node(8, 0)
    assert accelerators.crowding == 1
    assert accelerators.with_devices(4).device == DEVICE
