"""Clusters of several kinds of devices, and of nodes that are slow."""

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ClusterError
from shoal.spec.cluster import Cluster, Device, Level, Part

INSIDE = Level(name="inside", devices=8, bandwidth=400e9)


def device(name="d", memory=80e9, rate=1e15):
    return Device(name=name, memory=memory, bandwidth=3e12, peak={"bf16": rate, "fp32": 1e14}, units=132)


def cluster(*parts, **fields):
    devices = sum(part.devices for part in parts)
    outside = Level(name="network", devices=devices, bandwidth=50e9)
    return Cluster(name="c", device=parts[0].device, levels=(INSIDE, outside), parts=parts, **fields)


PARTS = st.lists(
    st.builds(
        Part,
        device=st.builds(device, st.sampled_from("abc"), st.floats(1e9, 1e12), st.floats(1e12, 1e16)),
        devices=st.integers(1, 6).map(lambda nodes: 8 * nodes),
        pace=st.floats(0.05, 1),
    ),
    min_size=1,
    max_size=4,
)


@given(PARTS, st.data())
def test_ranks_wait_for_the_slowest_device_and_have_the_least_memory(parts, data):
    made = cluster(*parts)
    first = data.draw(st.integers(0, made.devices - 1))
    ranks = range(first, data.draw(st.integers(first, made.devices - 1)) + 1)
    by_rank = [part for part in parts for _ in range(part.devices)]  # the naive way
    used = [by_rank[rank] for rank in ranks]
    found = made.device_of(ranks)
    assert found.peak["bf16"] == pytest.approx(min(part.pace * part.device.peak["bf16"] for part in used))
    assert found.memory == min(part.device.memory for part in used)


@given(PARTS, st.data())
def test_fewer_devices_are_those_of_the_first_parts(parts, data):
    made = cluster(*parts)
    nodes = data.draw(st.integers(1, made.devices // 8))
    found = made.with_devices(8 * nodes)
    by_rank = [(part.device, part.pace) for part in parts for _ in range(part.devices)]
    kept = [(part.device, part.pace) for part in found.parts for _ in range(part.devices)]
    assert kept == by_rank[: 8 * nodes]


def test_a_pace_slows_all_that_a_device_does_and_equal_devices_are_one():
    made = cluster(Part(device=device(), devices=8), Part(device=device(), devices=8, pace=0.5))
    assert made.device_of(range(8)) == device()
    assert made.device_of(range(4, 12)).bandwidth == pytest.approx(device().bandwidth / 2)
    assert Cluster.preset("dgx-h100", 16).device_of(range(16)) == Cluster.preset("dgx-h100").device


def test_the_precision_decides_which_device_is_the_slowest():
    quick = Device(name="quick", memory=8e10, bandwidth=3e12, peak={"bf16": 2e15, "fp32": 1e13}, units=1)
    made = cluster(Part(device=device(), devices=8), Part(device=quick, devices=8))
    assert made.device_of(range(16), "bf16").name == "d"
    assert made.device_of(range(16), "fp32").name == "quick"


@pytest.mark.parametrize("ranks", [range(0), range(8, 17), range(-1, 3)])
def test_ranks_that_are_not_there_are_refused(ranks):
    with pytest.raises(ClusterError, match="ranks="):
        cluster(Part(device=device(), devices=16)).device_of(ranks)


def test_parts_have_together_what_plans_use():
    eight = Part(device=device(), devices=8)
    with pytest.raises(ClusterError, match="devices of its parts=8"):
        cluster(eight, eight).replace(parts=(eight,))
    with pytest.raises(ClusterError, match="devices=24"):
        cluster(eight, eight).with_devices(24)
    levels = (INSIDE, Level(name="network", devices=24, bandwidth=50e9))
    spare = Cluster(name="c", device=device(), levels=levels, parts=(eight, eight), spare=1)
    assert spare.devices == 16
    for pace in (0.0, 1.5):
        with pytest.raises(ClusterError, match="pace="):
            Part(device=device(), devices=8, pace=pace)


FILE = """
name = "mixed"
device = "h100"
failed = 1
levels = [
    { name = "nvlink", devices = 8, bandwidth = 450e9 },
    { name = "network", devices = 72, bandwidth = 50e9 },
]
[[parts]]
nodes = 4
[[parts]]
nodes = 1
pace = 0.9
[[parts]]
devices = 24
device = "a100-80"
"""


def test_a_file_names_devices_and_counts_nodes(tmp_path):
    path = tmp_path / "mixed.toml"
    path.write_text(FILE)
    found = Cluster.read(path)
    h100, a100 = Device.preset("h100"), Device.preset("a100-80")
    assert found.parts == (
        Part(device=h100, devices=32),
        Part(device=h100, devices=8, pace=0.9),
        Part(device=a100, devices=24),
    )
    assert found.devices == 64
    found.write(path)
    assert Cluster.read(path) == found


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda said: said["parts"][0].update(nodes=0), "part 1 of .* has nodes=0"),
        (lambda said: said["parts"][0].update(nodes="four"), "part 1 of .* has nodes=four"),
        (lambda said: said["parts"][0].update(devices=8), "part 1 of .* unknown key 'nodes'"),
        (lambda said: said["parts"][0].pop("nodes"), "part 1 of .* has no 'devices'"),
        (lambda said: said["parts"][1].update(pase=0.9), "unknown key 'pase' .did you mean 'pace'"),
        (lambda said: said["parts"][2].update(device="a101"), "not a known device"),
        (lambda said: said.update(device="h101"), "not a known device"),
        (lambda said: said.update(parts=3), "parts=3"),
    ],
)
def test_parts_that_cannot_be_read_are_refused_and_told_which(change, told):
    said = tomllib.loads(FILE)
    change(said)
    with pytest.raises(ClusterError, match=told):
        Cluster.of(said, "the file")
