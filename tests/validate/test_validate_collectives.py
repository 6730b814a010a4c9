"""Tables of timed collectives: their two kinds, the host's launches, and errors over operations."""

import pytest

from shoal.cli.main import main
from shoal.errors import UserError
from shoal.predict.cost.collectives import collective_seconds
from shoal.predict.validate import is_fitted, read_collectives, validate
from shoal.predict.validate.collectives import LAUNCH, over_all_collectives
from shoal.spec.cluster import Cluster
from shoal.spec.plan import Group

DEVICES = "op,device,ranks,size_bytes,time_us,source\n"
PLATFORMS = "op,platform,nodes,ranks,size_bytes,time_us,note\n"


def table(tmp_path, head, *lines):
    path = tmp_path / "table.csv"
    path.write_text(head + "".join(f"{line}\n" for line in lines))
    return path


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_of_a_device_are_priced_within_one_node_without_a_host(tmp_path, ranks):
    path = table(tmp_path, DEVICES, f"alltoall,H100-SXM5-80GB,{ranks},1024,9.0,NCCL 2.29")
    (found,) = validate(path)
    cluster = Cluster.preset("dgx-h100", ranks)
    expected = collective_seconds("all_to_all", 1024, Group(ranks), cluster)
    assert found.predicted == pytest.approx(expected)
    assert (found.family, found.measured) == ("H100-SXM5-80GB", pytest.approx(9e-6))


def test_a_call_that_a_host_launches_takes_at_least_as_long_as_its_largest_small_buffer(tmp_path):
    small = [f"all_reduce,DGX H100,1,8,{size},{time}," for size, time in ((8, 25), (32768, 37))]
    large = "all_reduce,DGX H100,1,8,65536,41,"
    for lines, launch in (([*small, large], 37e-6), ([large], LAUNCH)):
        (found,) = validate(table(tmp_path, PLATFORMS, *lines))
        assert found.predicted == pytest.approx(launch)


def test_small_buffers_of_several_nodes_tell_latencies_and_no_launch(tmp_path):
    lines = [f"all_reduce,DGX H100,2,16,{size},150," for size in (8, 65536)]
    (row,) = read_collectives(table(tmp_path, PLATFORMS, *lines))
    assert row.launch == LAUNCH


def test_a_launch_that_the_table_states_counts_and_moves_no_row_to_another_half(tmp_path):
    head = PLATFORMS.replace("note", "launch_us")
    lines = [f"all_reduce,DGX H100,1,8,65536,41,{launch}" for launch in (90, "")]
    stated, blank = read_collectives(table(tmp_path, head, *lines))
    assert (stated.launch, blank.launch) == (pytest.approx(90e-6), LAUNCH)
    assert is_fitted(stated) == is_fitted(blank)


def test_errors_are_told_by_operation_and_together_with_small_buffers_apart(tmp_path):
    lines = [
        f"{op},{device},8,{size},100,x"
        for op in ("all_reduce", "all_gather")
        for device in ("H100-SXM5-80GB", "B200-SXM")
        for size in (1024, 262144, 262145, 2**26)
    ]
    comparisons = validate(table(tmp_path, DEVICES, *lines))
    together = over_all_collectives(comparisons)
    assert {name: len(members) for name, members in together.items()} == {
        "all collectives": 8,
        "all collectives to 256KiB": 8,
    }
    assert {each.quantity for each in together["all collectives"]} == {"all_reduce", "all_gather"}
    assert over_all_collectives(comparisons[:4]) == {}


def test_the_command_tells_errors_of_devices_and_operations(tmp_path, capsys):
    lines = [f"{op},A100-SXM4-80GB,8,{2**26},600,x" for op in ("all_reduce", "reduce_scatter")]
    assert main(["validate", str(table(tmp_path, DEVICES, *lines)), "--json"]) == 0
    assert '"quantity": "all collectives"' in capsys.readouterr().out


def test_an_operation_that_is_not_known_is_named_with_its_line(tmp_path):
    with pytest.raises(UserError, match=r"line 2.*alltoallv"):
        validate(table(tmp_path, DEVICES, "alltoallv,H100-SXM5-80GB,8,1024,9.0,x"))
