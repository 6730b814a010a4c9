"""Topologies that NCCL and nvidia-smi show become Clusters; torn and foreign files are told by name."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from topologies import matrix, nccl_xml, switched

from shoal.errors import ClusterError
from shoal.spec.cluster import Cluster, Device
from shoal.spec.cluster.tables import table
from shoal.spec.cluster.topology import cluster_of, read_topology

# Links of each device of a DGX-1V: a hybrid cube, in which 6 links lead to 4 others.
CUBE = [
    *({1: 1, 2: 1, 3: 2, 4: 2}, {0: 1, 2: 2, 3: 1, 5: 2}, {0: 1, 1: 2, 3: 2, 6: 1}, {0: 2, 1: 1, 2: 2, 7: 1}),
    *({0: 2, 5: 1, 6: 1, 7: 2}, {1: 2, 4: 1, 6: 2, 7: 1}, {2: 1, 4: 1, 5: 2, 7: 2}, {3: 1, 4: 2, 5: 1, 6: 2}),
]


@pytest.fixture
def imported(tmp_path):
    """Reads the Cluster of a text."""

    def read(text, **given):
        path = tmp_path / "node.txt"
        path.write_text(text)
        return cluster_of(read_topology(path, given.get("device")), name="node", **given)

    return read


def same_links(found, preset):
    """Whether levels have the sizes and rates of a preset's."""
    figures = [(level.devices, level.bandwidth, level.mesh, level.reduces) for level in found.levels]
    return figures == [
        (level.devices, level.bandwidth, level.mesh, level.reduces) for level in Cluster.preset(preset).levels
    ]


def words(links):
    return {str(target): count for target, count in links.items()}


@pytest.mark.parametrize(
    ("preset", "pci", "lanes", "mbits"),
    [
        ("dgx-a100", "0x20b2", 12, 200_000),
        ("dgx-h100", "0x2330", 18, 400_000),
        ("azure-nd-h200-v5", "0x2335", 18, 400_000),
        ("h800-node", "0x2324", 8, 400_000),
        ("dgx-b200", "0x2901", 18, 400_000),
    ],
)
def test_a_dump_of_a_node_with_switches_gives_the_presets_links(imported, preset, pci, lanes, mbits):
    nets = [[(f"mlx5_{number}", mbits)] for number in range(8)]
    text = nccl_xml([{"switch": lanes}] * 8, pci=pci, nets=nets, far=[("mlx5_8", 100_000)])
    found, notes = imported(text)
    assert found.device == Cluster.preset(preset).device
    assert same_links(found, preset)
    assert not any("mlx5_8" in note for note in notes)  # behind no device's switch


def test_links_from_device_to_device_are_a_mesh(imported):
    found, _ = imported(nccl_xml(list(map(words, CUBE)), pci="0x1db5"))
    assert found.levels[0] == Cluster.preset("dgx-1v").levels[0]
    amd = [{str(other): 1 for other in range(8) if other != each} for each in range(8)]
    found, _ = imported(nccl_xml(amd, vendor="0x1002", pci="0x74a1", tag="xgmi"))
    assert found.levels[0] == Cluster.preset("mi300x-node").levels[0]


def test_bridges_join_pairs_and_slots_join_the_pairs(imported):
    pairs = [{str(each ^ 1): 12} for each in range(4)]
    found, _ = imported(
        nccl_xml(
            pairs, pci="0x20b5", speed="16.0 GT/s PCIe", nets=[[(f"eth{each}", 25_000)] for each in range(4)]
        )
    )
    assert [(level.name, level.devices) for level in found.levels] == [
        ("nvlink", 2),
        ("pcie", 4),
        ("network", 4),
    ]
    assert found.levels[0].bandwidth == 300e9
    assert found.levels[1].bandwidth == pytest.approx(31.5e9, rel=1e-3)  # 16 lanes of 16 GT/s
    assert found.levels[2].bandwidth == 25e9 / 8
    assert found.with_devices(16).devices == 16


@given(st.integers(1, 8), st.integers(1, 4), st.sampled_from([100, 200, 400]))
def test_the_network_is_that_of_all_interfaces_over_the_devices(tmp_path_factory, devices, nics, gbits):
    nets = [[(f"mlx5_{number}", 1000 * gbits)] if number < nics else [] for number in range(devices)]
    path = tmp_path_factory.mktemp("dumps") / "dump.xml"
    path.write_text(nccl_xml([{"switch": 18}] * devices, nets=nets))
    found, _ = cluster_of(read_topology(path), name="node")
    assert found.levels[-1].bandwidth * devices == pytest.approx(min(nics, devices) * gbits * 1e9 / 8)


@pytest.mark.parametrize(
    ("preset", "ways", "device"),
    [
        ("dgx-h100", switched(8, 18), "h100"),
        ("dgx-a100", switched(8, 12), "NVIDIA A100-SXM4-80GB"),
        ("a800-node", switched(8, 8), "a800"),
        ("dgx-2", switched(16, 6), "v100"),
        (
            "dgx-1v",
            [
                ["X" if a == b else f"NV{CUBE[a][b]}" if b in CUBE[a] else "SYS" for b in range(8)]
                for a in range(8)
            ],
            "v100",
        ),
        ("gh200-nvl4", switched(4, 6), "gh200"),
    ],
)
def test_a_matrix_gives_the_presets_links(imported, preset, ways, device):
    nics = [["PIX" if way == number else "SYS" for way in range(len(ways))] for number in range(len(ways))]
    found, notes = imported(matrix(ways, nics), device=device)
    assert found.levels[0].bandwidth == Cluster.preset(preset).levels[0].bandwidth
    assert found.levels[0].mesh == Cluster.preset(preset).levels[0].mesh
    assert found.devices == len(ways)
    assert any("not told" in note and "--nic-gbits" in note for note in notes)
    gbits, _ = imported(matrix(ways, nics), device=device, interface_rate=200e9 / 8)
    assert gbits.levels[-1].bandwidth == 25e9


def test_a_matrix_counts_the_nearest_interfaces_and_takes_the_device_that_the_file_names(imported):
    nics = [["PIX", *["SYS"] * 7], ["NODE"] * 8, ["SYS"] * 7 + ["PXB"]]
    names = "".join(f"GPU {each}: NVIDIA H100 80GB HBM3 (UUID: GPU-{each})\n" for each in range(8))
    found, notes = imported(names + matrix(switched(8, 18), nics, coloured=False))
    assert found.device == Device.preset("h100")
    assert any(re.search(r"2 network interfaces count.*: mlx5_0, mlx5_2$", note) for note in notes)
    found, notes = imported(matrix(switched(8, 18), [["NODE"] * 8]), device="h100")
    assert any("1 network interfaces count" in note for note in notes)


def test_without_direct_links_devices_are_joined_by_their_slots(imported):
    ways = [["X" if a == b else "PIX" if a // 2 == b // 2 else "SYS" for b in range(4)] for a in range(4)]
    found, notes = imported(matrix(ways), device="rtx-4090")
    assert [(level.name, level.devices, level.bandwidth) for level in found.levels] == [("pcie", 4, 31.5e9)]
    assert any("single node" in note for note in notes)
    alone, _ = imported(matrix([["X"]], [["PHB"]]), device="rtx-4090")
    assert alone.devices == 1
    assert alone.with_devices(2).devices == 2


DUMP = nccl_xml([{"switch": 18}] * 8)
MATRIX = matrix(switched(8, 18), [["PIX"] + ["SYS"] * 7])
CABLED = nccl_xml([{str(each ^ 1): 4} for each in range(4)], nets=[[("mlx5_0", 100_000)]] * 4)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (DUMP[: len(DUMP) // 2], "is not whole XML"),
        ("<graphs/>", "NCCL_GRAPH_DUMP_FILE"),
        ('<system version="1"><cpu/></system>', "has no <gpu>"),
        (DUMP.replace('count="18"', 'count="many"', 1), "count='many'"),
        (DUMP.replace('dev="0"', "", 1), "with dev=None"),
        (nccl_xml([{"switch": 18}] * 7 + [{}]), "do not have equal links .*device 7: 0"),
        (DUMP.replace("0x2330", "0x20b2", 1), "devices of several kinds"),
        (DUMP.replace("0x2330", "0xffff"), "does not say which device"),
        ("", "is not a topology"),
        ("index, name\n0, H100", "is not a topology"),
        ("\n".join(MATRIX.splitlines()[:5]), "has no row of GPU4"),
        (MATRIX.replace("GPU3\tNV18\tNV18", "GPU3\tNV18"), "GPU3"),
        (MATRIX.replace("NV18", "NVxx", 1), "'NVxx' between GPU0 and GPU1"),
        (MATRIX.replace("NV18", "SYS", 7), "'SYS' between GPU0 and GPU1, and"),
        (matrix([["X", "NV4", "SYS"], ["NV4", "X", "SYS"], ["SYS", "SYS", "X"]]), "do not have equal links"),
        (MATRIX.replace("NV18", "NV16", 1), "'NV16' between GPU0 and GPU1, and 'NV18' between GPU1 and GPU0"),
        (MATRIX, "does not say which device"),
    ],
)
def test_files_that_are_torn_or_of_another_kind_are_refused_by_name(imported, text, told):
    with pytest.raises(ClusterError, match=told) as refused:
        imported(text)
    assert refused.value.possible
    assert refused.value.change


@given(st.sampled_from([DUMP, MATRIX, CABLED]), st.data())
def test_whatever_is_cut_or_changed_gives_a_cluster_or_a_named_error(tmp_path_factory, text, data):
    first, last = sorted(data.draw(st.integers(0, len(text))) for _ in range(2))
    letters = st.text(st.characters(codec="utf-8"), max_size=4)
    other = data.draw(letters | st.sampled_from(["0", "-1", '"', "<"]))
    path = tmp_path_factory.mktemp("torn") / "node.txt"
    if data.draw(st.booleans()):
        last = min(last, first + 4)
    path.write_text(text[:first] + other + text[last:], encoding="utf-8")
    try:
        found, _ = cluster_of(read_topology(path, "h100"), name="node", device="h100")
    except ClusterError:  # any other error fails the test
        return
    assert found.devices >= 1


def test_a_device_that_cannot_have_these_links_is_refused(imported, tmp_path):
    with pytest.raises(ClusterError, match="a rtx-4090 has none that is known"):
        imported(MATRIX, device="rtx-4090")
    with pytest.raises(ClusterError, match="a a100-80 has 12"):
        imported(MATRIX, device="a100-80")
    with pytest.raises(ClusterError, match="not a known device"):
        imported(MATRIX, device="h101x")
    with pytest.raises(ClusterError, match="cannot be read: No such file"):
        read_topology(tmp_path / "none.xml")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ClusterError, match="is not text"):
        read_topology(tmp_path / "binary")


def test_the_table_of_interfaces_names_known_devices_and_links():
    interfaces = table("interfaces")
    assert set(interfaces["pci"]) <= set(table("devices"))
    identifiers = [each for told in interfaces["pci"].values() for each in told]
    assert len(identifiers) == len(set(identifiers))
    for lanes in interfaces["lanes"].values():
        assert set(lanes["of"]) <= set(table("devices"))
        assert lanes["link"] in table("links")
    assert set(interfaces["networks"].values()) <= set(table("links"))
