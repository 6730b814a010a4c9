"""Machines that are known by name."""

import tomllib
from importlib import resources

import pytest

from shoal.errors import ClusterError
from shoal.spec.cluster import PRESETS, Cluster, Device, peak_flops
from shoal.spec.cluster.tables import table

FILES = resources.files("shoal.spec.cluster")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_cluster_with_a_source_that_grows_by_nodes(name):
    node = Cluster.preset(name)
    assert node.name == name
    assert node.source
    assert node.device.source
    assert all(level.source for level in node.levels)
    if len(node.levels) > 1:
        assert Cluster.preset(name, 4 * node.devices).devices == 4 * node.devices
    assert Cluster.preset(name, 2).devices == 2


@pytest.mark.parametrize("name", table("devices"))
def test_every_device_has_all_its_figures_in_the_table_and_shares_below_its_data_sheet(name):
    device = Device.preset(name)
    written = set(table("devices")[name]) - {"match"}
    probed = {"stream_share", "graph"}  # which a probe tells
    unbounded = {"tile_bandwidth", "fp8_share", "fp8_tile_bandwidth", "exponentials", "flash2_share"}
    assert set(Device.__dataclass_fields__) - probed - unbounded <= written
    assert written <= set(Device.__dataclass_fields__) - probed
    assert device.peak["bf16"] >= device.peak["fp32"]


def test_every_link_of_the_table_is_of_a_node():
    used = {level["link"] for node in table("nodes").values() for level in node["levels"]}
    assert used == set(table("links"))


def test_nodes_are_joined_as_their_makers_say():
    p4d = Cluster.preset("aws-p4d", 16)
    assert (p4d.devices_per_node, p4d.levels[0].bandwidth) == (8, 300e9)
    assert p4d.devices_per_node * p4d.levels[1].bandwidth == 400e9 / 8  # 400 Gbit/s of a node
    assert Cluster.preset("dgx-h100", 16).levels[1].bandwidth == 400e9 / 8  # of a device
    assert Cluster.preset("gb200-nvl72").devices_per_node == 72
    spine = Cluster.preset("meta-24k").levels[-1]
    assert (spine.devices, spine.oversubscription) == (24576, 7.0)


def test_failures_are_those_of_llama_3():
    assert Cluster.preset("meta-24k").failures == pytest.approx(419 / (54 * 24 * 16384), rel=0.02)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("dgx-h100", "dgx-h100"),
        ("dgx-h100:64", "dgx-h100"),
        ("mi300x-node:4", "mi300x-node"),
    ],
)
def test_a_preset_is_written_with_its_devices_after_a_colon(given, name):
    devices = int(given.partition(":")[2] or 8)
    assert Cluster.parse(given) == Cluster.preset(name, devices)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("dgx-h10", "did you mean 'dgx-h100'"),
        ("dgx-h10:64", "did you mean 'dgx-h100'"),
        ("dgx-h100:many", "'many' as its number"),
        ("dgx-h100:", "'' as its number"),
        ("dgx-h100:12", "not a multiple of the 8"),
        ("dgx-h100:0", "devices=0"),
        ("laptop:0", "devices=0"),
    ],
)
def test_what_is_no_preset_is_refused_with_the_nearest(given, told):
    with pytest.raises(ClusterError, match=told):
        Cluster.parse(given)


@pytest.mark.parametrize(
    ("words", "device"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("A100-80GB", "a100-80"),
        ("A100-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("H100-80GB", "h100"),
        ("H100-96GB-500W", "h100-96"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI250X", "mi250x"),
        ("A800-SXM4-80GB", "a800"),
        ("NVIDIA H800", "h800"),
        ("h200", "h200"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40"),
        ("NVIDIA A800 80GB PCIe", "a100-pcie-80"),
        ("H100 80GB PCIe", "h100-pcie"),
        ("NVIDIA H800 PCIe", "h100-pcie"),
        ("H100-SXM5-80GB", "h100"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H20", "h20"),
        ("GB300", "gb300"),
        ("NVIDIA B300", "b300"),
        ("Tesla V100-SXM2-16GB", "v100-16"),
        ("16 x V100-SXM2-32GB", "v100"),
        ("Tesla V100-PCIE-16GB", "v100-pcie-16"),
        ("V100-PCIe-32GB", "v100-pcie-32"),
        ("Tesla P100-SXM2-16GB", "p100"),
        ("NVIDIA A30", "a30"),
        ("A40-48GB", "a40"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA A10", "a10"),
        ("A6000", "rtx-a6000"),
        ("NVIDIA RTX A6000", "rtx-a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("RTX A6000 Ada", "rtx-6000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("RTX A5000", "rtx-a5000"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L40", "l40"),
        ("NVIDIA L4", "l4"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("RTX3080", "rtx-3080"),
        ("RTX4090", "rtx-4090"),
        ("GeForce RTX 4080", "rtx-4080"),
        ("RTX 5090", "rtx-5090"),
        ("NVIDIA TITAN RTX", "titan-rtx"),
        ("Quadro RTX 8000", "rtx-8000"),
        ("GeForce RTX 2080 Ti", "rtx-2080-ti"),
    ],
)
def test_devices_are_known_by_the_names_of_drivers_and_tables(words, device):
    assert Device.preset(words) == Device.preset(device)
    assert peak_flops(words, "bf16") == Device.preset(device).peak["bf16"]


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        ("RTX 3090 Ti", "rtx-3090"),
        ("RTX 4090 D", "rtx-4090"),
        ("RTX 5000 Ada", "rtx-6000-ada"),
        ("MI210", "mi250x"),
    ],
)
def test_another_part_with_nearly_the_same_name_is_not_taken_for_it(words, nearest):
    with pytest.raises(ClusterError, match=f"did you mean '{nearest}'"):
        Device.preset(words)


def test_a_device_that_is_not_known_is_refused_and_has_no_peak():
    with pytest.raises(ClusterError, match="'H900' is not a known device"):
        Device.preset("H900")
    assert peak_flops("H900", "bf16") is None
    assert peak_flops("AMD EPYC", "fp32") is None


def test_published_machines_are_assembled_from_what_is_said_of_them():
    found = Cluster.assemble("A100-40GB", 128, 8, 200e9)
    assert (found.devices, found.devices_per_node, found.device.name) == (128, 8, "A100-SXM-40GB")
    assert found.levels[1].bandwidth == 25e9
    assert Cluster.assemble("p5.48xlarge (8xH100)", 16, 8, None) == Cluster.preset("aws-p5", 16)
    assert Cluster.assemble("H100-80GB", 4, 4, None).devices_per_node == 4
    assert Cluster.assemble("H100-80GB", 16, None, None) == Cluster.preset("dgx-h100", 16)
    with pytest.raises(ClusterError, match="not a known device"):
        Cluster.assemble("abacus", 8, 8, None)


def test_a_device_of_no_known_node_is_refused(monkeypatch):
    monkeypatch.setattr("shoal.spec.cluster.cluster.PRESETS", ("laptop",))
    with pytest.raises(ClusterError, match="no known node"):
        Cluster.assemble("MI250X", 8, 8, None)


@pytest.mark.parametrize("name", table("devices"))
def test_every_device_is_of_a_node_that_stands_for_machines_of_which_no_more_is_known(name):
    device = Device.preset(name)
    cluster = Cluster.assemble(name, 16, 8, None) if name != "cpu" else Cluster.preset("laptop")
    assert cluster.device == device


@pytest.mark.parametrize(
    ("name", "relative"),
    [("v100", "a100-80"), ("h100-pcie", "h100"), ("h200", "h100"), ("b300", "b200"), ("gb200", "b200")],
)
def test_a_tile_begins_and_ends_in_the_seconds_that_it_takes_on_the_relative_that_was_fitted(name, relative):
    def seconds(device):  # in which a unit computes as many inputs of a tile
        return device.product_depth * device.units / device.peak["bf16"]

    # the file writes depths as whole numbers, of a hundred or so
    assert seconds(Device.preset(name)) == pytest.approx(seconds(Device.preset(relative)), rel=0.01)


@pytest.mark.parametrize(
    ("words", "preset"),
    [
        ("p3.16xlarge", "aws-p3"),
        ("p3dn.24xlarge", "aws-p3dn"),
        ("g4dn.12xlarge", "aws-g4dn"),
        ("g5.48xlarge", "aws-g5"),
        ("g6.48xlarge", "aws-g6"),
        ("g6e.48xlarge", "aws-g6e"),
        ("GB300 NVL72", "gb300-nvl72"),
        ("GB200 NVL72", "gb200-nvl72"),
    ],
)
def test_instances_are_known_by_their_clouds_names(words, preset):
    assert Cluster.assemble(words, 8, None, None) == Cluster.preset(preset, 8)


@pytest.mark.parametrize(
    ("devices", "joined"), [(2, 2), (4, 4), (8, 8), (64, 64), (72, 72), (128, 64), (144, 72), (256, 64)]
)
def test_boards_of_a_rack_are_joined_by_its_switches_in_groups_of_one_size(devices, joined):
    found = Cluster.assemble("GB200", devices, 4, 200e9)
    assert (found.devices, found.devices_per_node) == (devices, joined)
    assert found.levels[1].bandwidth == 50e9  # of a device: a board's, divided among its four
    assert (
        Cluster.assemble("H100-80GB", 8, 4, None).devices_per_node == 4
    )  # of what is no rack a node is a node


WRITTEN = {
    key: entry
    for file in ("cards", "devices")
    for key, entry in tomllib.loads((FILES / f"{file}.toml").read_text("utf-8")).items()
}
"""The tables of devices as they are in the files."""

ALIKE = [key for key, entry in WRITTEN.items() if "like" in entry]


@pytest.mark.parametrize("name", ALIKE)
def test_what_is_not_written_of_a_device_is_its_relatives(name):
    device, relative = Device.preset(name), Device.preset(WRITTEN[name]["like"])
    for key in Device.__dataclass_fields__:
        assert getattr(device, key) == getattr(relative if key not in WRITTEN[name] else device, key)


@pytest.mark.parametrize("name", ALIKE)
def test_the_depth_of_a_relative_is_in_proportion_to_the_peak_of_a_unit(name):
    device, relative = Device.preset(name), Device.preset(WRITTEN[name]["like"])
    peaks = [each.peak["bf16"] / each.units for each in (device, relative)]
    expected = relative.product_depth * peaks[0] / peaks[1]
    assert device.product_depth == pytest.approx(expected, abs=0.5)  # the file writes whole numbers


@pytest.mark.parametrize("name", table("devices"))
def test_narrower_types_are_as_much_quicker_as_makers_make_them(name):
    peak = Device.preset(name).peak
    # data sheets round, and give the clocks of some types alone
    assert peak.get("fp8", 2 * peak["bf16"]) == pytest.approx(2 * peak["bf16"], rel=0.02)
    assert peak.get("tf32", peak["bf16"] / 2) == pytest.approx(peak["bf16"] / 2, rel=0.02)


def test_cards_that_may_not_write_to_each_other_exchange_at_less_than_half_of_a_slots_rate():
    slot = 31.5e9  # 16 lanes of PCIe 4
    assert Cluster.preset("rtx-4090-node").levels[0].rate(8) < slot / 2
    assert slot / 2 < Cluster.preset("a100-pcie-node").levels[0].rate(8) < slot


def test_links_are_as_many_as_the_parts_for_one_market_have():
    assert Cluster.preset("h800-node").levels[0].bandwidth == 200e9  # 400 GB/s both ways
    assert Cluster.preset("a800-node").levels[0].bandwidth == 200e9
    assert Cluster.preset("mi250x-node").devices * 12.5e9 == 4 * 200e9 / 8  # four interfaces for eight dies
