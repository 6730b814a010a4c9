"""`shoal probe` and `shoal calibrate`, and the report's comparison."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.predict.simulate import simulate
from shoal.spec.cluster import Cluster
from shoal.spec.plan import Plan
from shoal.spec.run import Run
from shoal.spec.workload import shape, workload_of

BATCH = 4


def test_one_rank_writes_a_description_that_loads(programs, tmp_path):
    file = tmp_path / "cluster.toml"
    words = ["probe", "--quick", "--ranks=1", f"--out={file}", f"--files={tmp_path}", "--json"]
    done = programs.run(words)
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    cluster = Cluster.read(file)
    assert cluster.name == content["cluster"]["name"] == "cluster"
    assert cluster.devices == 1
    assert 1e6 < cluster.host.file_bandwidth < 1e12
    assert {each["quantity"] for each in content["errors"]} >= {"products fp32", "passes over memory"}
    assert f"description written to {file}" in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--backend=gluo"], "did you mean 'gloo'"),
        (["--ranks=0"], "--ranks 0 is too small"),
        (["--out=/nowhere/at/all.toml"], "cannot be written to"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(words, told, capsys):
    assert main(["probe", "--backend=gloo", "--out=cluster.toml", *words]) == 2
    assert told in capsys.readouterr().err


def test_old_measurements_are_fitted_again_with_the_links_of_a_preset_and_validated(tmp_path, capsys):
    data = Path(__file__).resolve().parents[2] / "benchmarks" / "data"
    out = tmp_path / "mine.toml"
    words = ["probe", "--from", str(data / "probe_h100.json"), "--links", "dgx-h100", "--out", str(out)]
    assert main([*words, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    cluster = Cluster.parse(f"{out}:32")
    assert (cluster.devices, cluster.devices_per_node) == (32, 8)
    assert Cluster.read(out) == Cluster.of(content["cluster"], "json")
    assert content["warnings"] == []
    assert main(["validate", str(data / "steps_one_h100.csv"), "--cluster", str(out), "--json"]) == 0
    errors = [each["error"] for each in json.loads(capsys.readouterr().out)["rows"]]
    assert len(errors) == 2 * 29
    assert main([*words[:-2], "--out", str(out), "--links", "dgx-h1000"]) == 2
    assert "dgx-h100" in capsys.readouterr().err


@pytest.fixture
def machine(tmp_path):
    """A file of two devices, and a run of a slower machine, as it would have been recorded."""
    found = Cluster.preset("laptop").with_devices(2)
    found.write(tmp_path / "cluster.toml")
    device = found.device
    slower = found.replace(
        device=replace(
            device,
            product_share=device.product_share / 2,
            attention_share=device.attention_share / 2,
            attention_backward_share=device.attention_backward_share / 2,
            bandwidth_share=device.bandwidth_share / 2,
        )
    )
    plan = Plan.parse("dp=2,microbatch=2")
    config = {"model": "tiny", "model_options": {}, "batch": BATCH, "sequence": 128}
    run = Run.create(tmp_path / "run", {"plan": str(plan), "world_size": 2, "config": config})
    workload = workload_of(shape("tiny").replace(seq=128))
    simulate(workload, slower, plan, BATCH, steps=5).timeline.write(run.timeline)
    return tmp_path


def errors_of(machine, cluster, capsys):
    assert main(["report", str(machine / "run"), "--json", "--cluster", str(cluster)]) == 0
    return {each["kind"]: each["error"] for each in json.loads(capsys.readouterr().out)["kinds"]}


def test_calibrate_writes_a_description_whose_next_prediction_is_nearer(machine, capsys):
    before = errors_of(machine, machine / "cluster.toml", capsys)
    out = machine / "corrected.toml"
    words = ["calibrate", str(machine / "run"), "--cluster", str(machine / "cluster.toml"), "--out", str(out)]
    assert main(words) == 0
    assert "compute" in capsys.readouterr().out
    after = errors_of(machine, out, capsys)
    for kind in ("forward", "backward", "optimizer", "step"):
        assert abs(after[kind]) < abs(before[kind])


def test_the_report_shows_predicted_beside_measured(machine, capsys):
    assert main(["report", str(machine / "run"), "--cluster", str(machine / "cluster.toml")]) == 0
    assert "predicted beside measured" in capsys.readouterr().out


def test_a_run_of_a_model_that_is_no_preset_cannot_be_predicted(machine, capsys):
    config = {"model": "mine:build", "batch": 4, "sequence": 128}
    Run.open(machine / "run").describe({"plan": "dp=2", "config": config})
    assert main(["report", str(machine / "run"), "--cluster", str(machine / "cluster.toml")]) == 2
    assert "trained mine:build" in capsys.readouterr().err
