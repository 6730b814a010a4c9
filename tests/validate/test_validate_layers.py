"""Tables of measured layers and collectives become layouts and clusters, or named errors."""

import pytest

from shoal.errors import DataError
from shoal.predict.validate.collectives import read_collectives
from shoal.predict.validate.operations import read_layers
from shoal.spec.cluster import Cluster

LAYERS = "experiment,forward_ms,backward_ms,config\n"
COLLECTIVES = "op,platform,nodes,ranks,size_bytes,time_us,note\n"


def test_a_layers_layout_is_read_from_its_words(tmp_path):
    path = tmp_path / "layers.csv"
    config = "one layer of 22B: h=6144 a=64 s=2048 mbs=4 TP=8 A100-80GB"
    path.write_text(f"{LAYERS}selective+sequence,7.2,13.1,{config}\nbaseline,7.7,11.9,{config}\n")
    split, plain = read_layers(path)
    assert (split.layout.tensor, split.layout.recompute) == ("sequence", "selective")
    assert (plain.layout.tensor, plain.layout.recompute) == ("plain", "none")
    assert (split.layout.microbatch, split.layout.tp, split.device) == (4, 8, "A100-80GB")
    assert (split.shape.hidden, split.shape.heads, split.shape.seq, split.shape.ffn) == (
        6144,
        64,
        2048,
        24576,
    )
    assert (split.forward, split.backward) == pytest.approx((0.0072, 0.0131))


@pytest.mark.parametrize(
    "config", ["h=6144 A100-80GB", "h=6144 a=60 s=2048 mbs=4 TP=8 A100", "h=0 a=1 s=1 mbs=1 TP=1 x"]
)
def test_a_layer_that_is_not_described_is_refused(tmp_path, config):
    path = tmp_path / "layers.csv"
    path.write_text(f"{LAYERS}baseline,7.7,11.9,{config}\n")
    with pytest.raises(DataError, match=r"line 2 of .* has config="):
        read_layers(path)


def test_collectives_of_small_buffers_and_of_unknown_ranks_are_left_out(tmp_path):
    path = tmp_path / "collectives.csv"
    path.write_text(
        f"{COLLECTIVES}all_reduce,DGX A100,1,8,65536,40,\nall_reduce,DGX A100,1,8,32768,40,\n"
        "all_reduce,DGX A100,16?,128?,1048576,40,\nall_gather,DGX A100,2,16,1048576,80,Ring\n"
    )
    first, last = read_collectives(path)
    assert (first.collective, first.nbytes, first.seconds) == ("all_reduce", 65536, pytest.approx(40e-6))
    assert (first.cluster.devices, first.algorithm) == (8, None)
    assert (last.line, last.cluster.devices, last.cluster.devices_per_node, last.algorithm) == (
        5,
        16,
        8,
        "ring",
    )


@pytest.mark.parametrize(
    ("platform", "node"),
    [
        ("p5.48xlarge (8xH100, 3200G EFA)", "aws-p5"),
        ("p5en.48xlarge 8xH200 EFA 3200G", "aws-p5en"),
        ("P6-B200 (8xB200 NVLink5, 8x50GB/s EFAv4)", "aws-p6-b200"),
        ("ND_H100_v5", "azure-nd-h100-v5"),
        ("dgx-a100", "dgx-a100"),
    ],
)
def test_a_platform_is_the_preset_that_its_name_tells(tmp_path, platform, node):
    path = tmp_path / "collectives.csv"
    path.write_text(f'{COLLECTIVES}all_reduce,"{platform}",2,16,1048576,40,\n')
    assert read_collectives(path)[0].cluster == Cluster.preset(node, 16)


def test_some_devices_of_a_node_keep_its_links(tmp_path):
    path = tmp_path / "collectives.csv"
    path.write_text(f"{COLLECTIVES}all_reduce,MI300X xGMI,1,2,1048576,40,\n")
    (row,) = read_collectives(path)
    assert row.cluster.levels == Cluster.preset("mi300x-node", 2).levels


def test_ranks_that_nodes_do_not_share_evenly_are_refused(tmp_path):
    path = tmp_path / "collectives.csv"
    path.write_text(f"{COLLECTIVES}all_reduce,DGX A100,3,8,65536,40,\n")
    with pytest.raises(DataError, match="8 ranks on 3 nodes"):
        read_collectives(path)
