"""`shoal scale`: the curve, where it stops paying, the picture."""

import json
from xml.etree import ElementTree

import pytest

from shoal.cli.main import main
from shoal.predict.cost.time import workload_on
from shoal.predict.planner import Search
from shoal.spec.cluster import Cluster
from shoal.spec.workload import shape

ASKED = ["scale", "--model", "350m", "--cluster", "dgx-a100", "--batch", "256", "--devices", "8..64"]


def curve(capsys, *arguments):
    assert main([*ASKED, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_each_point_is_the_best_plan_of_its_devices(capsys):
    points = curve(capsys)["points"]
    assert [point["devices"] for point in points] == [8, 16, 32, 64]
    for point in points:
        cluster = Cluster.preset("dgx-a100").with_devices(point["devices"])
        best = Search(workload_on(cluster, shape("350m")), cluster, 256).best(1).best
        assert point["plan"] == str(best.plan)


def test_efficiency_is_tokens_a_second_of_a_device_over_those_on_the_fewest(capsys):
    first, *rest = curve(capsys)["points"]
    assert first["efficiency"] == 1
    for point in rest:
        fewer = first["tokens_per_second"] / first["devices"]
        assert point["efficiency"] == pytest.approx(point["tokens_per_second"] / point["devices"] / fewer)


def test_amdahls_law_keeps_what_is_not_compute_on_the_fewest_devices(capsys):
    first, *rest = curve(capsys)["points"]
    work = first["parts"]["compute"] + first["parts"].get("control", 0.0)  # late ranks wait for compute
    serial = first["step_seconds"] - work
    for point in rest:
        divided = work * first["devices"] / point["devices"]
        assert point["amdahl_seconds"] == pytest.approx(serial + divided)


def test_devices_stop_paying_where_doubling_brings_less_than_half(capsys):
    arguments = [*ASKED[:-4], "--batch", "64", "--devices", "8,16,32,64,128,256"]
    assert main([*arguments, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    rates = {point["devices"]: point["tokens_per_second"] for point in summary["points"]}
    pays_to = next((n for n in rates if 2 * n in rates and rates[2 * n] < 1.5 * rates[n]), None)
    assert summary["pays_to"] == pays_to
    assert main(arguments) == 0
    assert ("stops paying at" in capsys.readouterr().out) == (pays_to is not None)


def test_a_batch_for_each_device_grows_with_them(capsys):
    arguments = [*ASKED[:-4], "--batch-per-device", "4", "--devices", "8,16"]
    assert main([*arguments, "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [point["batch"] for point in points] == [32, 64]
    assert points[1]["amdahl_seconds"] == pytest.approx(points[0]["step_seconds"])


def test_numbers_of_devices_that_nothing_fits_are_told(capsys):
    asked = ["scale", "--model", "llama2-70b", "--cluster", "dgx-a100", "--batch", "64", "--devices", "8,32"]
    assert main([*asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unfit"] == [8]


def test_the_picture_is_well_formed_and_has_every_number_of_devices(capsys, tmp_path):
    path = tmp_path / "curve.svg"
    assert main([*ASKED, "--svg", str(path)]) == 0
    texts = {element.text for element in ElementTree.parse(path).iter() if element.text}
    assert {"8", "16", "32", "64"} <= texts


@pytest.mark.parametrize("devices", ["64..8", "none", "0..8", ""])
def test_devices_that_cannot_be_read_are_refused(capsys, devices):
    assert main([*ASKED[:-1], devices]) == 2
    assert "--devices" in capsys.readouterr().err


def test_a_model_that_fits_none_of_the_numbers_is_refused(capsys):
    asked = ["scale", "--model", "llama3-405b", "--cluster", "dgx-a100", "--batch", "64", "--devices", "8,16"]
    assert main(asked) == 2
    assert "does not fit 16 devices" in capsys.readouterr().err
